"""Kills, signals and what stays behind, with the simulated model and real processes."""

import asyncio
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from harness import Reply, Server, free_port, post, serving, shared_memory_files

pytestmark = pytest.mark.slow

FLAGS = ("--model", "sim:step_ms=20", "--served-model-name", "sim", "--max-num-seqs", "32")


def completion(**fields) -> dict:
    return {"model": "sim", "prompt": "Tell me about rivers.", "stream": True, "ignore_eos": True} | fields


def files_of(server: Server) -> list[str]:
    return [name for name in shared_memory_files() if name.split("-")[2] == str(server.process.pid)]


async def kill_during_streams(server: Server, victim: psutil.Process) -> tuple[list[Reply], float]:
    tasks = [asyncio.create_task(post(server, "/v1/completions", completion(max_tokens=3000))) for _ in range(32)]
    await asyncio.sleep(1.5)
    victim.kill()
    killed = time.monotonic()
    return await asyncio.gather(*tasks), killed


def test_a_killed_worker_ends_each_stream_with_one_error_and_comes_back():
    with serving(*FLAGS) as server:
        old_worker = server.worker.pid
        replies, killed = asyncio.run(kill_during_streams(server, server.worker))
        for reply in replies:
            assert (reply.status, reply.num_errors, reply.num_done, reply.finish_reason) == (200, 1, 1, None)
            assert "worker_lost" in reply.body
            assert reply.ended - killed < 3
        server.wait_ready(30)
        assert server.worker.pid != old_worker
        assert asyncio.run(post(server, "/v1/completions", completion(max_tokens=5))).finish_reason == "length"
        assert server.metrics()["headrace_worker_restarts_total"] == 1
        pid = server.process.pid
    assert [name for name in shared_memory_files() if name.split("-")[2] == str(pid)] == []


def test_a_worker_that_hangs_is_killed_and_replaced():
    """A stopped process is alive and silent: its streams end with an error, and a new worker serves."""
    with serving(*FLAGS, "--hang-timeout-seconds", "3") as server:
        old_worker = server.worker

        async def run() -> Reply:
            task = asyncio.create_task(post(server, "/v1/completions", completion(max_tokens=3000)))
            await asyncio.sleep(1)
            old_worker.suspend()
            return await asyncio.wait_for(task, 15)

        reply = asyncio.run(run())
        assert (reply.num_errors, reply.num_done) == (1, 1)
        server.wait_ready(30)
        assert server.worker.pid != old_worker.pid


def test_a_killed_gateway_comes_back_and_the_worker_forgets_its_requests():
    with serving(*FLAGS) as server:
        asyncio.run(kill_during_streams(server, server.gateway))
        time.sleep(0.2)
        server.wait_ready(30)
        reply = asyncio.run(post(server, "/v1/completions", completion(max_tokens=5)))
        assert reply.finish_reason == "length"
        deadline = time.monotonic() + 3
        while server.metrics()["headrace_num_requests_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_after_kill_9_of_everything_a_new_start_cleans_up():
    with serving(*FLAGS) as server:
        family = [psutil.Process(server.process.pid), server.gateway, server.worker]
        for process in family:
            process.kill()
        psutil.wait_procs(family, 5)
        left = files_of(server)
        assert left
    with serving(*FLAGS):
        assert not set(left) & set(shared_memory_files())


def test_children_stop_when_the_supervisor_is_killed():
    with serving(*FLAGS) as server:
        children = [server.gateway, server.worker]
        server.process.kill()
        _, alive = psutil.wait_procs(children, 10)
        assert alive == []
    subprocess.run([sys.executable, "-m", "headrace", "doctor"], check=False, capture_output=True)
    assert files_of(server) == []


def test_ops_01_02_sigterm_lets_running_streams_finish():
    """OPS-01, OPS-02: readiness 503 at once, liveness 200, new work refused, running streams end with [DONE], exit code 0."""
    with serving(*FLAGS) as server:

        async def run() -> tuple[list[Reply], int, int, Reply]:
            tasks = [asyncio.create_task(post(server, "/v1/completions", completion(max_tokens=150))) for _ in range(5)]
            await asyncio.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            ready = (await asyncio.to_thread(server.get, "/health/ready"))[0]
            live = (await asyncio.to_thread(server.get, "/health/live"))[0]
            late = await post(server, "/v1/completions", completion(max_tokens=5))
            return await asyncio.gather(*tasks), ready, live, late

        replies, ready, live, late = asyncio.run(run())
        assert (ready, live, late.status) == (503, 200, 503)
        assert json.loads(late.body)["error"]["code"] == "draining"
        assert int(late.headers["retry-after"]) >= 1
        assert late.headers["connection"] == "close", "a balancer's pool would come back on this connection"
        assert all((reply.finish_reason, reply.num_done) == ("length", 1) for reply in replies)
        assert server.process.wait(15) == 0
        assert files_of(server) == []


def test_ops_01_a_second_signal_stops_at_once():
    with serving(*FLAGS) as server:

        async def run() -> list[Reply]:
            tasks = [asyncio.create_task(post(server, "/v1/completions", completion(max_tokens=3000))) for _ in range(5)]
            await asyncio.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

        started = time.monotonic()
        replies = asyncio.run(run())
        assert all((reply.num_errors, reply.num_done, reply.finish_reason) == (1, 1, None) for reply in replies)
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 10


def test_ops_01_after_the_grace_time_streams_end_with_an_error_frame():
    with serving(*FLAGS, "--drain-seconds", "1") as server:

        async def run() -> Reply:
            task = asyncio.create_task(post(server, "/v1/completions", completion(max_tokens=3000)))
            await asyncio.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            return await task

        reply = asyncio.run(run())
        assert (reply.num_errors, reply.num_done) == (1, 1)
        assert server.process.wait(10) == 0


def start_failing(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use_is_said_plainly():
    with serving(*FLAGS) as server:
        second = start_failing(*FLAGS, "--port", str(server.port))
    assert second.returncode == 1
    assert str(server.port) in second.stderr
    assert "Traceback" not in second.stderr


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    cases = {
        ("--model", str(broken)): "gguf",
        ("--model", str(tmp_path / "absent.gguf")): "absent.gguf",
        ("--model", "sim:no_such_key=1"): "no_such_key",
        ("--max-num-batched-tokens", "1"): "--max-num-batched-tokens",
    }
    for flags, word in cases.items():
        refused = start_failing(*flags, "--port", str(free_port()))
        assert refused.returncode == 1, flags
        assert word in refused.stderr.lower(), refused.stderr
        assert "Traceback" not in refused.stderr


def test_an_unknown_key_in_the_configuration_is_fatal(tmp_path):
    config = tmp_path / "headrace.toml"
    config.write_text("[server]\nprot = 1\n")
    refused = start_failing("--config", str(config))
    assert refused.returncode == 1
    assert "prot" in refused.stderr


def test_the_server_outlives_whoever_reads_its_log():
    """As behind `| head -1`, or when the collector of logs dies: serving, restarts and stopping do not hang on a line."""
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", "--port", str(port), *FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.stderr.close()
    server = Server(process, "127.0.0.1", port, 0.0)
    try:
        server.wait_ready(60)
        assert asyncio.run(post(server, "/v1/completions", completion(max_tokens=5))).finish_reason == "length"
        worker = server.worker
        worker.kill()
        worker.wait(5)
        while server.get("/health/ready")[0] == 200:
            time.sleep(0.005)  # ends when the gateway has heard of it, at the latest with the test's time limit
        server.wait_ready(60)
        assert asyncio.run(post(server, "/v1/completions", completion(max_tokens=5))).finish_reason == "length"
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def test_idle_processes_do_not_poll():
    with serving(*FLAGS) as server:
        time.sleep(1)
        processes = [psutil.Process(server.process.pid), server.gateway, server.worker]
        switches = [process.num_ctx_switches().voluntary for process in processes]
        time.sleep(3)
        grown = [process.num_ctx_switches().voluntary - before for process, before in zip(processes, switches, strict=True)]
        assert max(grown) < 3 * 60, grown  # a poll each 10 ms would be 300


def test_run_answers_on_the_terminal():
    command = [sys.executable, "-m", "headrace", "run", "--kv-cache-gib", "0.25", "What is the capital of France?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_models_and_doctor_report():
    listed = subprocess.run([sys.executable, "-m", "headrace", "models", "--json"], capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    examined = subprocess.run([sys.executable, "-m", "headrace", "doctor"], capture_output=True, text=True, check=False)
    assert examined.returncode == 0, examined.stdout + examined.stderr


def test_sigterm_while_the_model_is_prepared_ends_everything(tmp_path):
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--cache-dir", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert psutil.wait_procs(children, 2)[1] == []
    finally:
        process.kill()
