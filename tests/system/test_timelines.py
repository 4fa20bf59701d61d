"""Timelines against real processes: each stall that is brought about has its right cause; /debug; the log's level.

The simulated model says how long a step takes, so what is waited for is known.
"""

import concurrent.futures
import http.client
import json
import pathlib
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness import Server, serving
from tests.system.exchanges import events_of

pytestmark = pytest.mark.slow

WAIT_SECONDS = 30
THRESHOLD = ("--stall-threshold-ms", "100")
NAME = ("--served-model-name", "sim")
ASK = {"x-headrace-timeline": "true"}


def call(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one exchange."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, {"content-type": "application/json"} | (headers or {}))
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The timeline of one streamed completion. `prompt_ids`: that many ids, different for each `salt`."""
    num_ids, salt = fields.pop("prompt_ids", 4), fields.pop("salt", 0)
    body = {"prompt": [100 + (salt * 7919 + i * 31) % 20000 for i in range(num_ids)], "ignore_eos": True, "stream": True}
    status, _, content = call(server, "POST", "/v1/completions", body | fields, ASK)
    assert status == 200, content
    (report,) = events_of(content)[-1]["timeline"]
    return report


def debug(server: Server) -> dict[str, Any]:
    status, _, content = call(server, "GET", "/debug/requests?limit=1000")
    assert status == 200, content
    found: dict[str, Any] = json.loads(content)
    return found


def until(check: Callable[[], Any]) -> Any:
    """What the check gives once it gives something."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
    return found


def live_with(server: Server, **wanted: Any) -> list[dict[str, Any]]:
    return [report for report in debug(server)["live"] if all(report[name] == value for name, value in wanted.items())]


def causes(report: dict[str, Any]) -> set[str]:
    """The causes of a timeline's stalls, after a look at what must hold of all of them."""
    for stall in report["stalls"]:
        assert stall["duration_ms"] >= 100
        assert stall["at_ms"] >= -0.001
        if stall["cause"] != "slow_reader":  # what was sent may be read after the request's end
            assert stall["at_ms"] + stall["duration_ms"] <= report["age_ms"] + 0.01
    assert report["num_stalls"] >= len(report["stalls"])
    return {stall["cause"] for stall in report["stalls"]}


def stalls_counted(server: Server, cause: str) -> float:
    return server.metrics()[f'headrace_stalls_total{{cause="{cause}"}}']


def test_a_request_that_gets_on_has_phases_that_add_up_and_no_stall():
    with serving("--model", "sim:step_ms=5", *NAME, *THRESHOLD) as server:
        before = time.time()
        report = complete(server, max_tokens=8)
        assert causes(report) == set()
        assert (report["state"], report["finish_reason"], report["output_tokens"]) == ("finished", "length", 8)
        assert set(report["phases"]) == {"tokenize", "queue", "prefill", "decode"}
        assert sum(report["phases"].values()) == pytest.approx(report["last_token_ms"], abs=0.01)
        assert report["phases"]["decode"] >= 7 * 4
        stamps = ("tokenized_ms", "queued_ms", "first_scheduled_ms", "first_token_ms", "last_token_ms", "end_ms")
        assert [report[name] for name in stamps] == sorted(report[name] for name in stamps)
        assert before - 1 <= report["arrived_at"] <= time.time() + 1
        assert debug(server)["finished"][0] == report | {"arrived_at": pytest.approx(report["arrived_at"], abs=0.01)}


def test_a_long_prefill_of_another_is_the_cause_where_it_is_not_cut_into_chunks():
    whole = ("--max-num-batched-tokens", "4096", "--no-step-time-budget")
    flags = ("--model", "sim:step_ms=4,token_us=300", *NAME, *THRESHOLD, *whole)
    with serving(*flags) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        victim = pool.submit(complete, server, max_tokens=150)
        until(lambda: live_with(server, state="decode"))
        other = complete(server, prompt_ids=2000, max_tokens=2, salt=1)  # 600 ms in one step
        report = victim.result(WAIT_SECONDS)
        (stall,) = [stall for stall in report["stalls"] if stall["cause"] == "prefill"]
        assert causes(report) <= {"prefill", "slow_step", "worker_busy"}, "a busy machine may add short ones of its own"
        assert stall["duration_ms"] == pytest.approx(600, abs=250)
        assert other["phases"]["prefill"] == pytest.approx(600, abs=250)
        assert causes(other) <= {"worker_busy"}, "its own prompt's computing is no stall"
        assert stalls_counted(server, "prefill") == 1


def test_slow_steps_are_the_cause_where_there_is_no_prefill():
    with serving("--model", "sim:step_ms=150", *NAME, *THRESHOLD) as server:
        report = complete(server, max_tokens=4)
        assert causes(report) == {"slow_step"}
        assert report["num_stalls"] == 3  # between four tokens


def test_a_preempted_request_says_so():
    flags = ("--model", "sim:step_ms=20,num_blocks=8,block_size=16", *NAME, *THRESHOLD, "--max-model-len", "120")
    with serving(*flags) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        calls = [pool.submit(complete, server, prompt_ids=32, max_tokens=60, salt=salt) for salt in range(2)]
        until(lambda: live_with(server, state="preempted", waiting_for="preempted"))
        reports = [each.result(WAIT_SECONDS) for each in calls]
        preempted = [report for report in reports if report["preemptions"]]
        assert preempted
        for report in preempted:
            assert "preempted" in causes(report)
            assert report["output_tokens"] == 60


def test_a_request_that_waits_for_memory_says_so():
    flags = ("--model", "sim:step_ms=20,num_blocks=8,block_size=16", *NAME, *THRESHOLD, "--max-model-len", "120")
    with serving(*flags) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        holder = pool.submit(complete, server, prompt_ids=90, max_tokens=25)
        until(lambda: live_with(server, state="decode"))
        waiter = pool.submit(complete, server, prompt_ids=90, max_tokens=2, salt=1)
        until(lambda: live_with(server, state="queued", waiting_for="no_blocks"))
        assert causes(holder.result(WAIT_SECONDS)) == set()
        report = waiter.result(WAIT_SECONDS)
        assert causes(report) == {"no_blocks"}
        (stall,) = report["stalls"]
        assert stall["duration_ms"] == pytest.approx(report["first_scheduled_ms"] - max(stall["at_ms"], 0), abs=30)


def test_a_request_that_waits_for_a_place_says_so():
    flags = ("--model", "sim:step_ms=10", *NAME, *THRESHOLD, "--max-num-seqs", "1")
    with serving(*flags) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(complete, server, max_tokens=40)
        until(lambda: live_with(server, state="decode"))
        report = complete(server, max_tokens=2, salt=1)
        assert causes(report) == {"no_slot"}


def test_a_client_that_stops_reading_and_goes_on_is_a_slow_reader():
    """The name of the model is long, so that a few hundred events fill what the system holds for a connection."""
    name = "m" * 30_000
    flags = ("--model", "sim:step_ms=1,token_us=1", "--served-model-name", name, *THRESHOLD)
    body = json.dumps({"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nx-request-id: slow\r\n"
    with serving(*flags) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT_SECONDS)
        client.connect((server.host, server.port))
        client.sendall(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
        until(lambda: client.recv(1024))
        until(lambda: live_with(server, request_id="slow", waiting_for="slow_reader"))
        time.sleep(0.7)
        seen = b""
        while part := client.recv(1 << 20):
            seen = (seen + part)[-200:]
        assert b"data: [DONE]" in seen
        (report,) = [report for report in debug(server)["finished"] if report["request_id"] == "slow"]
        assert "slow_reader" in causes(report)
        assert max(stall["duration_ms"] for stall in report["stalls"]) > 500
        assert (report["finish_reason"], report["output_tokens"]) == ("length", 4000)
        assert stalls_counted(server, "slow_reader") >= 1
        finished = complete(server, max_tokens=3)
        assert causes(finished) == set()


def test_a_killed_worker_is_the_cause_and_the_timeline_follows_the_error():
    with serving("--model", "sim:step_ms=20", *NAME, *THRESHOLD) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True}
        streamed = pool.submit(call, server, "POST", "/v1/completions", body | {"stream": True}, ASK)
        whole = pool.submit(call, server, "POST", "/v1/completions", body, ASK)
        until(lambda: len(live_with(server, state="decode")) == 2)
        server.worker.suspend()  # silent before it dies, so that there is something to wait for
        time.sleep(0.4)
        server.worker.kill()
        *_, error, last = events_of(streamed.result(WAIT_SECONDS)[2])
        assert error["error"]["code"] == "worker_lost"
        status, headers, content = whole.result(WAIT_SECONDS)
        answer = json.loads(content)
        assert (status, answer["error"]["code"]) == (503, "worker_lost")
        assert "total;dur=" in {name.lower(): value for name, value in headers.items()}["server-timing"]
        for report in (*last["timeline"], *answer["timeline"]):
            assert (report["state"], report["error_code"]) == ("finished", "worker_lost")
            assert causes(report) == {"worker_lost"}
            assert report["stalls"][-1]["duration_ms"] >= 350


def test_debug_is_guarded_over_real_sockets(monkeypatch):
    with serving("--model", "sim:step_ms=1", *NAME, "--host", "127.0.0.1") as server:
        for headers, wanted in (
            ({}, 200),
            ({"host": f"localhost:{server.port}"}, 200),
            ({"host": "rebound.example"}, 403),
            ({"x-forwarded-for": "10.0.0.9"}, 403),
        ):
            assert call(server, "GET", "/debug/requests", headers=headers)[0] == wanted, headers
        assert [call(server, "GET", path)[0] for path in ("/metrics", "/health")] == [200, 200]
    monkeypatch.setenv("HEADRACE_ADMIN_TOKEN", "hush-hush")
    with serving("--model", "sim:step_ms=1", *NAME) as server:
        for token, wanted in ((None, 401), ("wrong", 401), ("hush-hush", 200)):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            assert call(server, "GET", "/debug/log-level", headers=headers)[0] == wanted, token
        assert [call(server, "GET", path)[0] for path in ("/metrics", "/health")] == [200, 200]


def test_clients_of_other_addresses_need_the_token():
    """The machine's own address that is not a loopback one stands for another machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address = probe.getsockname()[0]
        except OSError:
            pytest.skip("this machine has a loopback address only")
    if address.startswith("127."):
        pytest.skip("this machine has a loopback address only")
    with serving("--model", "sim:step_ms=1", *NAME, "--host", "0.0.0.0") as server:
        connection = http.client.HTTPConnection(address, server.port, timeout=10)
        connection.request("GET", "/debug/requests", headers={"host": "localhost"})
        assert connection.getresponse().status == 403
        connection.close()


def lines_of(text: str, component: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if line.get("component") == component]


class Log:
    """What the processes of a server write, in a file: what pytest captures loses lines when it is read meanwhile."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "server.log"

    def lines(self, component: str) -> list[dict[str, Any]]:
        whole, _, _ = self.path.read_text().rpartition("\n")  # the last line may be half written
        return lines_of(whole, component)


def test_the_log_level_changes_in_the_worker(tmp_path):
    log = Log(tmp_path)
    with serving("--model", "sim:step_ms=1", *NAME, "--log-format", "json", log=log.path) as server:
        assert call(server, "PUT", "/debug/log-level", {"level": "debug"})[0] == 200
        until(lambda: any(line["level"] == "debug" for line in log.lines("worker")))
        complete(server, max_tokens=2)
        assert not any(line["level"] == "error" for line in log.lines("worker"))


def test_the_log_level_changes_in_gateway_and_supervisor_and_holds_for_those_started_later(tmp_path):
    log = Log(tmp_path)
    with serving("--model", "sim:step_ms=1", *NAME, "--log-format", "json", log=log.path) as server:
        assert json.loads(call(server, "GET", "/debug/log-level")[2]) == {"level": "info"}
        complete(server, max_tokens=2)
        until(lambda: len(log.lines("request")) == 1)
        assert call(server, "PUT", "/debug/log-level", {"level": "error"})[0] == 200
        assert json.loads(call(server, "GET", "/debug/log-level")[2]) == {"level": "error"}
        complete(server, max_tokens=2)
        server.worker.kill()
        until(lambda: any(line["event"] == "worker died" for line in log.lines("supervisor")))
        server.wait_ready(WAIT_SECONDS)
        server.gateway.kill()
        until(lambda: server.get("/health/ready")[0] == 0)
        server.wait_ready(WAIT_SECONDS)
        complete(server, max_tokens=2)
        assert json.loads(call(server, "GET", "/debug/log-level")[2]) == {"level": "error"}, "a new gateway begins with it"
        assert len(log.lines("request")) == 1
        assert len([line for line in log.lines("supervisor") if line["event"] == "worker ready"]) == 1, "the second is info"
    assert not any(line["event"] == "stopped" for line in log.lines("supervisor"))


def test_prompts_are_in_the_log_only_when_the_operator_wants_them(capfd):
    for flags, is_shown in (((), False), (("--log-prompts",), True)):
        with serving("--model", "sim:step_ms=1", *NAME, "--log-format", "json", *flags, quiet=False) as server:
            call(server, "POST", "/v1/completions", {"prompt": "The wheelwright's secret", "max_tokens": 2})
        text = capfd.readouterr().err
        assert lines_of(text, "request"), "a line for the request"
        assert ("wheelwright" in text) == is_shown


def test_classes_and_tenants_of_the_configuration_reach_the_timeline(tmp_path):
    config = tmp_path / "headrace.toml"
    config.write_text(
        "[classes.gold]\nlevel = 0\nttft_target_ms = 500\ntbt_target_ms = 50\n[tenants.acme]\nweight = 2\n"
        "[server]\ndefault_class = 'gold'\n"
    )
    with serving("--model", "sim:step_ms=1", *NAME, "--config", str(config)) as server:
        seen = []
        for headers in ({}, {"x-headrace-tenant": "acme", "x-headrace-class": "batch"}, {"x-headrace-tenant": "x"}):
            status, _, content = call(server, "POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 1}, ASK | headers)
            assert status == 200
            (report,) = json.loads(content)["timeline"]
            seen.append((report["class"], report["tenant"]))
        assert seen == [("gold", "default"), ("batch", "acme"), ("gold", "other")]
        assert call(server, "POST", "/v1/completions", {"prompt": "Hi"}, {"x-headrace-class": "lead"})[0] == 400


def test_a_record_is_begun_and_never_overwritten(tmp_path, capfd):
    path = tmp_path / "traffic.jsonl"
    with serving("--model", "sim:step_ms=1", *NAME, "--record", str(path)) as server:
        complete(server, max_tokens=3, priority=4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["type"] == "header"
    assert [line["type"] for line in lines].count("arrival") == [line["type"] for line in lines].count("end") == 1
    (arrival,) = [line for line in lines if line["type"] == "arrival"]
    assert (arrival["prompt_tokens"], arrival["max_tokens"], arrival["priority"]) == (4, 3, 4)
    assert sum(line["type"] == "step" for line in lines) >= 3
    with (
        pytest.raises(RuntimeError, match="ended with 1"),
        serving("--model", "sim:step_ms=1", "--record", str(path), quiet=False),
    ):
        pass
    assert "never overwritten" in capfd.readouterr().err
    assert json.loads(path.read_text().splitlines()[0]) == lines[0]
