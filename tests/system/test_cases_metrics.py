"""Cases about metrics, preemption and health, with real processes and a simulated model: numbers seen by clients must agree."""

import asyncio
import contextlib
import http.client
import json
import math
import subprocess
import time
import urllib.parse

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import Reply, Server, post, serving
from tests.system.exchanges import ask, refusal

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"


def body(prompt: str = "Tell me about rivers.", **fields) -> dict:
    options = {"include_usage": True}
    return {"model": "sim", "prompt": prompt, "stream": True, "stream_options": options, "ignore_eos": True} | fields


def wait_idle(server: Server, seconds: float = 5.0) -> dict[str, float]:
    """The metrics once nothing runs, waits or holds memory."""
    deadline = time.monotonic() + seconds
    while True:
        metrics = server.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if not any(metrics[f"headrace_{name}"] for name in names):
            return metrics
        assert time.monotonic() < deadline, "the server does not become idle"
        time.sleep(0.02)


class Growth:
    """How much each metric has grown since it was made."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.before = wait_idle(server)
        self.after: dict[str, float] = {}

    def measure(self) -> None:
        self.after = wait_idle(self.server)

    def __getitem__(self, name: str) -> float:
        return self.after[f"headrace_{name}"] - self.before.get(f"headrace_{name}", 0)

    def ended(self) -> dict[str, float]:
        """Requests that ended, by reason, without zeros."""
        prefix = 'headrace_request_success_total{finished_reason="'
        grown = {name: self.after[name] - self.before.get(name, 0) for name in self.after if name.startswith(prefix)}
        return {name.removeprefix(prefix).removesuffix('"}'): value for name, value in grown.items() if value}


def test_met_04_07_counts_agree_whatever_ends_a_request():
    """MET-04, MET-07: some leave before their first token and some after; prompts are computed in chunks; some stop early."""
    flags = ("--model", "sim:step_ms=5,token_us=20", "--served-model-name", "sim", "--max-num-seqs", "2")
    with serving(*flags, "--max-num-batched-tokens", "64") as server:
        text = ask(server, COMPLETE, prompt="Where does it end?", max_tokens=20, temperature=0)["choices"][0]["text"]
        growth = Growth(server)

        async def leave_the_queue() -> None:
            task = asyncio.create_task(post(server, COMPLETE, body("word " * 100, max_tokens=50)))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def run() -> list[Reply]:
            full = [
                asyncio.create_task(post(server, COMPLETE, body(f"{n} " + "word " * 200, max_tokens=300))) for n in range(2)
            ]
            await asyncio.sleep(0.1)
            await asyncio.gather(*(leave_the_queue() for _ in range(4)))
            assert not any(task.done() for task in full), "the queue moved too early"
            leaving = [post(server, COMPLETE, body(max_tokens=2000), leave_after=3) for _ in range(3)]
            stopped = [post(server, COMPLETE, body("Where does it end?", temperature=0, stop=[text[20:26]])) for _ in range(2)]
            *replies, _, _, _ = await asyncio.gather(*full, *stopped, *leaving)
            return replies

        replies = asyncio.run(run())
        growth.measure()
        assert [reply.finish_reason for reply in replies] == ["length"] * 2 + ["stop"] * 2
        assert growth.ended() == {"length": 2, "stop": 2, "abort": 7}
        assert growth["requests_started_total"] == 11
        assert growth["time_to_first_token_seconds_count"] == 7, "once for each that emitted a token, and for no other"
        assert growth["e2e_request_latency_seconds_count"] == 4
        tokens = growth["request_generation_tokens_sum"]
        assert growth["inter_token_latency_seconds_count"] == tokens - 7
        sent = sum(reply.usage["completion_tokens"] for reply in replies)
        assert sent + 3 * 3 <= tokens
        assert tokens <= growth["generation_tokens_total"] <= tokens + 5 * 20, (
            "at most a few steps in vain for each that ended early"
        )
        prompts = sum(reply.usage["prompt_tokens"] for reply in replies)
        assert growth["prompt_tokens_total"] + growth["prompt_tokens_cached_total"] >= prompts
        assert growth["metrics_faults_total"] == 0


def test_met_05_08_sch_04_preemption_distorts_nothing():
    """MET-05, MET-08, SCH-01, SCH-04, DET-04: a pool for two and a half requests, eight at once, all with a common prefix."""
    model = "sim:step_ms=1,token_us=5,num_blocks=50,block_size=4"
    with serving("--model", model, "--served-model-name", "sim", "--max-num-seqs", "8") as server:
        bodies = [body(f"One river, and number {n}", max_tokens=64, temperature=0) for n in range(8)]
        alone = [asyncio.run(post(server, COMPLETE, one)).text for one in bodies]
        growth = Growth(server)

        async def together() -> list[Reply]:
            return await asyncio.gather(*(post(server, COMPLETE, one) for one in bodies))

        replies = asyncio.run(together())
        growth.measure()
        assert growth["num_preemptions_total"] >= 1, "nothing was preempted"
        assert growth["prefix_cache_hits_total"] >= 1, "nothing was found in the prefix cache"
        assert [reply.text for reply in replies] == alone
        assert growth["time_to_first_token_seconds_count"] == growth["request_queue_time_seconds_count"] == 8
        assert growth["inter_token_latency_seconds_count"] == 8 * 63
        assert growth["generation_tokens_total"] == growth["request_generation_tokens_sum"] == 8 * 64
        assert growth["prompt_tokens_total"] + growth["prompt_tokens_cached_total"] == growth["request_prompt_tokens_sum"]
        first = max(reply.stamps[0] - reply.sent for reply in replies)
        assert growth["time_to_first_token_seconds_sum"] <= 8 * (first + 0.05)
        assert growth["metrics_faults_total"] == 0
        status, error = refusal(server, COMPLETE, prompt=[5] * 200)
        assert (status, error["code"]) == (400, "context_length_exceeded"), "SCH-01: what can never fit is refused at the door"
        assert ask(server, COMPLETE, prompt="small", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_met_01_02_10_what_clients_choose_adds_no_series(sim_server: Server):
    """MET-01, MET-02, MET-10: 1,000 strange paths, model names, users, tenants and classes; the text stays valid."""
    strange = [f'{number}-"\\n\\\\{{}}é\\u2028' for number in range(1000)]

    def exchange(method: str, path: str, body: dict | None = None, headers: dict[str, str] | None = None) -> int:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"content-type": "application/json"} | (headers or {}))
        reply = connection.getresponse()
        reply.read()
        return reply.status

    def attack(name: str) -> set[int]:
        plain = {"model": "sim", "prompt": "x", "max_tokens": 1}
        quoted = urllib.parse.quote(name)
        return {
            exchange("GET", f"/wp-admin/{quoted}"),
            exchange("POST", COMPLETE, plain | {"model": name}),
            exchange("POST", COMPLETE, plain | {"user": name}, {"x-headrace-tenant": quoted}),
            exchange("POST", COMPLETE, plain, {"x-headrace-class": quoted}),
        }

    with contextlib.closing(http.client.HTTPConnection(sim_server.host, sim_server.port, timeout=30)) as connection:
        assert attack(strange[0]) <= {200, 400, 404}
        sim_server.metrics()  # a scrape counts itself only after it was answered
        before = set(sim_server.metrics())
        for name in strange[1:]:
            attack(name)
    assert set(sim_server.metrics()) == before
    wait_idle(sim_server)
    text = sim_server.get("/metrics")[1]
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        for sample in family.samples:
            assert math.isfinite(sample.value)
            assert sample.labels.get("model_name") == (None if family.name == "headrace_http_requests" else "sim")


def test_met_11_a_step_is_counted_once_for_all_its_rows(sim_server: Server):
    """MET-11: eight at once; the steps' time adds up to no more than the time that passed."""
    growth = Growth(sim_server)
    began = time.monotonic()

    async def run() -> list[Reply]:
        return await asyncio.gather(*(post(sim_server, COMPLETE, body(f"{n} rivers", max_tokens=50)) for n in range(8)))

    replies = asyncio.run(run())
    passed = time.monotonic() - began
    growth.measure()
    assert sum(reply.usage["completion_tokens"] for reply in replies) == growth["generation_tokens_total"] == 400
    assert 50 <= growth["step_duration_seconds_count"] < 200
    assert 0.2 <= growth["step_duration_seconds_sum"] <= passed
    assert growth["iteration_tokens_sum"] >= growth["generation_tokens_total"] - 8 + growth["prompt_tokens_total"]


def test_dis_01_a_client_of_http_2_that_leaves_is_seen(sim_server: Server):
    growth = Growth(sim_server)
    command = ["curl", "-sN", "--http2-prior-knowledge", sim_server.url + COMPLETE, "-H", "content-type: application/json"]
    payload = json.dumps(body(max_tokens=3000))
    with subprocess.Popen([*command, "-d", payload], stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        assert curl.stdout.read(1000).startswith(b"data: ")
        curl.kill()
    growth.measure()
    assert growth.ended() == {"abort": 1}
    assert growth["generation_tokens_total"] < 1000


def test_dis_07_health_tells_of_steps_not_of_sockets():
    """DIS-07: a worker that stands still makes the server not ready, though HTTP answers; then it goes on without loss."""
    flags = ("--model", "sim:step_ms=5", "--served-model-name", "sim", "--progress-timeout-seconds", "2")
    with serving(*flags) as server:

        async def run() -> tuple[Reply, list[int]]:
            task = asyncio.create_task(post(server, COMPLETE, body(max_tokens=200)))
            await asyncio.sleep(0.3)
            worker = server.worker
            worker.suspend()
            try:
                await asyncio.sleep(2.5)
                paths = ("/health", "/health/ready", "/health/live", "/v1/models")
                statuses = [(await asyncio.to_thread(server.get, path))[0] for path in paths]
            finally:
                worker.resume()
            return await task, statuses

        reply, statuses = asyncio.run(run())
        assert statuses == [503, 503, 200, 200]
        assert (reply.finish_reason, reply.usage and reply.usage["completion_tokens"]) == ("length", 200)
        server.wait_ready(5)


def test_gauges_are_zero_within_a_second_after_fifty_dropped_streams():
    """MET-07: every dropped request is counted as ended; a scrape changes nothing but what counts scrapes and CPU time."""
    with serving("--model", "sim:step_ms=10,token_us=20", "--served-model-name", "sim") as server:

        async def drop_all() -> None:
            await asyncio.gather(*(post(server, COMPLETE, body(f"{n} go", max_tokens=4000), leave_after=3) for n in range(50)))

        asyncio.run(drop_all())
        metrics = wait_idle(server, seconds=1.0)
        ended = sum(value for name, value in metrics.items() if name.startswith("headrace_request_success_total"))
        assert metrics["headrace_requests_started_total"] == ended == 50
        before, after = server.metrics(), server.metrics()
        changed = {name for name in after if after[name] != before.get(name)}
        assert all("/metrics" in name or "cpu_seconds" in name for name in changed)
