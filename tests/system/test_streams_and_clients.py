"""The simulated model over real HTTP: many streams, clients that leave, faults inside a stream, metrics that add up."""

import asyncio
import json
import random
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness import Reply, Server, post, serving

pytestmark = pytest.mark.slow


def completion(prompt: str = "Tell me about rivers.", **fields) -> dict:
    return {"model": "sim", "prompt": prompt, "stream": True, "ignore_eos": True} | fields


def wait_until(holds, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def idle(server: Server) -> bool:
    metrics = server.metrics()
    names = ("headrace_num_requests_running", "headrace_num_requests_waiting", "headrace_kv_cache_usage_perc")
    return all(metrics[name] == 0 for name in names)


def finished(metrics: dict[str, float]) -> dict[str, float]:
    prefix = "headrace_request_success_total"
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


def test_sse_04_every_stream_ends_with_exactly_one_done(sim_server: Server):
    """SSE-04: 200 streams, 8 at a time, mixed lengths and finish causes."""
    rng = random.Random(4)

    async def client(bodies: list[dict]) -> list[Reply]:
        return [await post(sim_server, "/v1/completions", body) for body in bodies]

    def body() -> dict:
        return completion(max_tokens=rng.randint(1, 64), stop=rng.choice([None, ["a"], ["zzzz"]]))

    async def run() -> list[Reply]:
        groups = await asyncio.gather(*(client([body() for _ in range(25)]) for _ in range(8)))
        return [reply for group in groups for reply in group]

    replies = asyncio.run(run())
    assert len(replies) == 200
    for reply in replies:
        assert (reply.status, reply.num_done, reply.num_errors, reply.fault) == (200, 1, 0, "")
        assert reply.finish_reason in ("stop", "length")
    assert {reply.finish_reason for reply in replies} == {"stop", "length"}


def test_sse_13_streams_are_not_compressed_and_come_at_once(sim_server: Server):
    request = urllib.request.Request(
        sim_server.url + "/v1/completions",
        json.dumps(completion(max_tokens=50)).encode(),
        {"content-type": "application/json", "accept-encoding": "gzip"},
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert reply.headers.get("content-encoding") is None
        first = reply.readline()
        first_seconds = time.monotonic() - started
        reply.read()
    assert first.startswith(b"data: ")
    assert first_seconds < (time.monotonic() - started) / 2


@pytest.mark.parametrize("stream", [True, False])
def test_dis_01_a_client_that_leaves_frees_everything(sim_server: Server, stream: bool):
    """DIS-01: close after 3 tokens (or while waiting for the whole); gauges fall, one more abort is counted."""

    async def leave() -> None:
        task = asyncio.create_task(
            post(sim_server, "/v1/completions", completion(max_tokens=2000, stream=stream), leave_after=3)
        )
        if not stream:
            await asyncio.sleep(0.3)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    before = finished(sim_server.metrics())
    asyncio.run(leave())
    wait_until(lambda: idle(sim_server), 2)
    after = finished(sim_server.metrics())
    aborted = next(name for name in after if "abort" in name)
    assert after[aborted] == before.get(aborted, 0) + 1


def test_dis_04_five_hundred_streams_left_after_two_chunks(sim_server: Server):
    async def client() -> None:
        for _ in range(62):
            await post(sim_server, "/v1/completions", completion(max_tokens=200), leave_after=2)

    async def run() -> None:
        await asyncio.gather(*(client() for _ in range(8)))

    asyncio.run(run())
    wait_until(lambda: idle(sim_server), 2)
    reply = asyncio.run(post(sim_server, "/v1/completions", completion(max_tokens=5)))
    assert reply.finish_reason == "length"


def test_met_04_07_counts_agree(sim_server: Server):
    """MET-04, MET-07: TTFT count = requests that emitted; TBT count = tokens - 1 of each; reasons add up to the started."""
    wait_until(lambda: idle(sim_server))
    before = sim_server.metrics()

    async def run() -> list[Reply]:
        options = {"include_usage": True}
        return await asyncio.gather(
            *(post(sim_server, "/v1/completions", completion(max_tokens=n + 1, stream_options=options)) for n in range(12))
        )

    replies = asyncio.run(run())
    wait_until(lambda: idle(sim_server))
    after = sim_server.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    tokens = sum(reply.usage["completion_tokens"] for reply in replies)
    assert tokens == sum(range(1, 13))
    assert grown("headrace_time_to_first_token_seconds_count") == 12
    assert grown("headrace_inter_token_latency_seconds_count") == tokens - 12
    assert grown("headrace_generation_tokens_total") == tokens
    assert grown("headrace_requests_started_total") == 12
    assert grown('headrace_request_success_total{finished_reason="length"}') == 12
    assert grown("headrace_request_generation_tokens_sum") == tokens
    assert sum(finished(after).values()) == after["headrace_requests_started_total"]


def test_met_01_02_10_series_stay_bounded_and_parse(sim_server: Server):
    """MET-01, MET-02, MET-10: random paths, models and users add no series; the official parser reads the page."""
    sim_server.get("/random/0")
    asyncio.run(post(sim_server, "/v1/completions", completion(model='m\n"0"', user="u0")))
    before = set(sim_server.metrics())
    for number in range(100):
        sim_server.get(f"/random/{number}")

    async def run() -> None:
        for number in range(100):
            await post(sim_server, "/v1/completions", completion(model=f'm\n"{number}"', user=f"u{number}"))

    asyncio.run(run())
    assert set(sim_server.metrics()) == before
    families = [family.name for family in text_string_to_metric_families(sim_server.get("/metrics")[1])]
    assert len(families) == len(set(families))


def test_sse_02_05_a_fault_inside_a_stream_is_one_error_frame():
    """SSE-02, SSE-05: tokens already sent stay, then one error frame, then the end marker, no finish_reason."""
    with serving("--model", "sim:step_ms=1,fail_after_tokens=3", "--served-model-name", "sim") as server:
        reply = asyncio.run(post(server, "/v1/completions", completion(max_tokens=20)))
        assert reply.status == 200
        assert (len(reply.texts) >= 1, reply.num_errors, reply.num_done, reply.finish_reason) == (True, 1, 1, None)
        whole = asyncio.run(post(server, "/v1/completions", completion(max_tokens=20, stream=False)))
        assert whole.status == 500
        assert json.loads(whole.body)["error"]["code"] == "execution_failed"
        again = asyncio.run(post(server, "/v1/completions", completion(max_tokens=3)))
        assert again.finish_reason == "length"


def test_dis_02_queued_requests_of_gone_clients_are_dropped_without_prefill():
    """DIS-02: one slot busy, three queued and left: they leave the queue while it is busy, and are never computed."""
    with serving("--model", "sim:step_ms=10", "--served-model-name", "sim", "--max-num-seqs", "1") as server:

        def computed() -> dict[str, float]:
            metrics = server.metrics()
            names = ("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total")
            return {name: metrics[f"headrace_{name}"] for name in names}

        async def wait_for_queue(num_waiting: int) -> None:
            deadline = time.monotonic() + 2
            while (await asyncio.to_thread(server.metrics))["headrace_num_requests_waiting"] != num_waiting:
                assert time.monotonic() < deadline, f"there are never {num_waiting} in the queue"
                await asyncio.sleep(0.02)

        async def run() -> dict[str, float]:
            busy = asyncio.create_task(post(server, "/v1/completions", completion(max_tokens=300)))
            await asyncio.sleep(0.5)
            before = await asyncio.to_thread(computed)
            queued = [
                asyncio.create_task(post(server, "/v1/completions", completion("x " * 200, max_tokens=9))) for _ in range(3)
            ]
            await wait_for_queue(3)
            for task in queued:
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
            await wait_for_queue(0)
            assert not busy.done(), "the place was free too early to tell"
            assert (await busy).finish_reason == "length"
            return before

        before = asyncio.run(run())
        wait_until(lambda: idle(server))
        time.sleep(0.5)  # for steps that must not come
        after = computed()
        assert idle(server)
        assert after["prompt_tokens_total"] == before["prompt_tokens_total"]
        assert after["prompt_tokens_cached_total"] == before["prompt_tokens_cached_total"]
        assert after["generation_tokens_total"] == 300
        ended = finished(server.metrics())
        assert {name.split('"')[1]: value for name, value in ended.items() if value} == {"length": 1, "abort": 3}


def test_a_full_queue_is_an_answer_not_a_wait():
    """RAT-07, RAT-08 in kind: past the bound 503 with a Retry-After that is a whole number of seconds; the others finish."""
    flags = ("--model", "sim:step_ms=10", "--served-model-name", "sim", "--max-num-seqs", "2", "--max-queued-requests", "4")
    with serving(*flags) as server:

        async def run() -> list[Reply]:
            return await asyncio.gather(*(post(server, "/v1/completions", completion(max_tokens=50)) for _ in range(20)))

        replies = asyncio.run(run())
        served = [reply for reply in replies if reply.status == 200]
        refused = [reply for reply in replies if reply.status == 503]
        assert (len(served), len(refused)) == (6, 14)
        assert all(reply.num_done == 1 for reply in served)
        assert all(json.loads(reply.body)["error"]["code"] == "overloaded" for reply in refused)
