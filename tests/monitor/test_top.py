"""`headrace top` as a command, against a real server with a simulated model."""

import concurrent.futures
import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator

import pytest

from bench.harness import Server, free_port, serving

pytestmark = pytest.mark.slow

TOP = [sys.executable, "-m", "headrace", "top"]
STYLES = re.compile(r"\x1b\[[0-9;]*m")
MODEL = ("--model", "sim:step_ms=10,token_us=50", "--served-model-name", "sim")


def generate(server: Server, max_tokens: int) -> None:
    body = {"model": "sim", "prompt": "Tell me about rivers.", "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as reply:
        reply.read()


@contextlib.contextmanager
def load(server: Server, num_clients: int = 6, max_tokens: int = 40) -> Iterator[None]:
    """Closed loop."""
    ends = time.monotonic() + 60
    is_over = False

    def client() -> None:
        while not is_over and time.monotonic() < ends:
            generate(server, max_tokens)

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        for _ in range(num_clients):
            pool.submit(client)
        try:
            yield
        finally:
            is_over = True


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MODEL, quiet=False) as found:
        yield found


def once(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, "--once", *flags], capture_output=True, text=True, timeout=60)


def test_one_frame_under_load_as_json(server: Server) -> None:
    with load(server):
        time.sleep(1)
        done = once("--url", server.url, "--json", "--interval", "2")
    assert done.returncode == 0, done.stderr
    frame = json.loads(done.stdout)
    assert set(frame) == {
        *("unix_seconds", "window_seconds", "server", "metrics_error", "throughput", "latency_seconds"),
        *("batch", "cache", "gateway", "stalls", "requests"),
    }
    assert 1.9 < frame["window_seconds"] < 10
    assert frame["server"] | {"version": ""} == {
        "url": server.url,
        "status": "ready",
        "reason": None,
        "model": "sim",
        "version": "",
        "worker_up": True,
        "worker_restarts": 0,
    }
    throughput, batch = frame["throughput"], frame["batch"]
    assert 1 <= batch["running"] <= 6
    assert 1 <= batch["rows_per_step"] <= 6
    # A row of a step is a token of a sequence (but for the prompts' chunks): the two ways to count must agree.
    steps = batch["steps_per_second"] * batch["rows_per_step"]
    assert throughput["output_tokens_per_second"] == pytest.approx(steps, rel=0.15)
    assert throughput["finished_per_second"]["length"] == pytest.approx(throughput["started_per_second"], rel=0.5)
    assert batch["step_seconds"]["p50"] >= 0.008
    assert sum(batch["stage_shares"].values()) == pytest.approx(1)
    assert frame["latency_seconds"]["tbt"]["all"]["p50"] >= 0.008
    assert frame["latency_seconds"]["ttft"]["by_class"]["standard"]["count"] > 0
    assert 0 < frame["cache"]["usage"] < 1
    assert set(frame["gateway"]["ring_fill"]) == {"request", "event"}
    assert frame["gateway"]["cpu_seconds_per_token"] > 0
    requests = frame["requests"]
    assert requests["error"] is None
    assert 1 <= requests["num_live"] <= 6
    assert {"request_id", "class", "tenant", "state", "age_seconds", "waiting_for", "longest_stall"} <= set(
        requests["slowest"][0]
    )


def test_requests_behind_a_token() -> None:
    with serving(*MODEL, "--admin-token", "open-sesame", quiet=False) as server:
        without = json.loads(once("--url", server.url, "--json", "--interval", "0.1").stdout)
        done = once("--url", server.url, "--json", "--interval", "0.1", "--admin-token", "open-sesame")
    assert without["requests"]["error"].startswith("HTTP 401: ")
    assert without["requests"]["num_live"] is None
    assert without["server"]["status"] == "ready"
    assert json.loads(done.stdout)["requests"] == {"error": None, "num_live": 0, "slowest": []}


def test_one_frame_as_text(server: Server) -> None:
    done = once("--url", server.url, "--interval", "0.2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"headrace top  {server.url}   sim")
    assert "\nREADY   worker up" in done.stdout
    assert "\x1b" not in done.stdout


def test_no_server_is_exit_code_1() -> None:
    done = once("--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "cannot be reached: Connection refused" in done.stderr
    assert done.stdout == ""


def test_wrong_use_is_exit_code_2() -> None:
    for flags in (["--json"], [], ["--once", "--url", "ftp://x"], ["--once", "--interval", "0"]):
        done = subprocess.run([*TOP, *flags], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, flags


class Screen:
    """`headrace top` in a terminal of 80 by 24; `seen` is all that it wrote."""

    def __init__(self, url: str, terminal: str = "xterm-256color") -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.settings = termios.tcgetattr(slave)
        self.slave = slave
        environment = {**os.environ, "TERM": terminal}
        self.process = subprocess.Popen(
            [*TOP, "--url", url, "--interval", "0.2"], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 30.0) -> None:
        """Until it stands in what comes from now on."""
        deadline = time.monotonic() + seconds
        new = ""
        while text not in new:
            assert time.monotonic() < deadline, f"{text!r} does not come: {new[-3000:]!r}"
            new += self.read(0.1)

    def read(self, seconds: float) -> str:
        if not select.select([self.master], [], [], seconds)[0]:
            return ""
        piece = os.read(self.master, 65536).decode("utf-8", "replace")
        self.seen += piece
        return STYLES.sub("", piece)

    def end(self) -> int:
        """Its exit code; what it writes until then is read."""
        deadline = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.05)
        while self.read(0.1):
            pass
        return self.process.wait(1)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@contextlib.contextmanager
def showing(url: str, terminal: str = "xterm-256color") -> Iterator[Screen]:
    screen = Screen(url, terminal)
    try:
        yield screen
    finally:
        screen.close()


@pytest.mark.parametrize("how", ["q", "ctrl-c", "sigterm"])
def test_it_ends_cleanly(server: Server, how: str) -> None:
    with showing(server.url) as screen:
        screen.wait_for("READY")
        if how == "sigterm":
            screen.process.send_signal(signal.SIGTERM)
        elif how == "ctrl-c":
            screen.process.send_signal(signal.SIGINT)
        else:
            os.write(screen.master, b"xq")
        assert screen.end() == 0
        assert "\x1b[?1049l" in screen.seen  # the screen as it was
        assert "Traceback" not in screen.seen
        assert termios.tcgetattr(screen.slave) == screen.settings


def test_a_dumb_terminal_is_sent_to_once(server: Server) -> None:
    """It cannot move its cursor back: each frame would stand below the last one."""
    with showing(server.url, "dumb") as screen:
        assert screen.end() == 2
        assert "--once prints one frame" in screen.seen


def test_it_goes_on_when_the_worker_is_killed() -> None:
    with serving(*MODEL, quiet=False) as server, load(server), showing(server.url) as screen:
        screen.wait_for("worker restarts 0")
        server.worker.kill()
        screen.wait_for("NOT READY")
        screen.wait_for("READY   worker up   worker restarts 1")
        assert "Traceback" not in screen.seen


def test_it_says_that_it_waits_while_the_server_hangs() -> None:
    with serving(*MODEL, quiet=False) as server, showing(server.url) as screen:
        screen.wait_for("READY   worker up")
        gateway = server.gateway
        gateway.suspend()
        try:
            screen.wait_for("no answer for 2 s")
            screen.wait_for("NOT REACHABLE, retrying   no answer in time")
        finally:
            gateway.resume()
        screen.wait_for("READY   worker up")
        os.write(screen.master, b"q")
        assert screen.end() == 0


def test_it_goes_on_when_the_server_dies_and_comes_back() -> None:
    port = free_port()
    with showing(f"http://127.0.0.1:{port}") as screen:
        screen.wait_for("NOT REACHABLE, retrying   Connection refused")
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-m", "headrace", "serve", "--port", str(port), *MODEL])
            try:
                screen.wait_for("READY   worker up")
            finally:
                process.terminate()
                process.wait(30)
            screen.wait_for("NOT REACHABLE")
        os.write(screen.master, b"q")
        assert screen.end() == 0
