"""Admission with real processes and a simulated model: who is refused hears it at once and costs the worker nothing.

One place and steps of 10 ms: a request of 100 tokens takes about a second.
"""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from harness import Reply, Server, post, serving

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"
INTERACTIVE = {"x-headrace-class": "interactive"}
TENANTS = "[tenants.heavy]\n[tenants.light]\n"


@contextlib.contextmanager
def one_place(folder: pathlib.Path, config: str = "", *flags: str) -> Iterator[Server]:
    path = folder / "headrace.toml"
    path.write_text(config)
    base = ("--model", "sim:step_ms=10", "--served-model-name", "sim", "--config", str(path), "--max-num-seqs", "1")
    with serving(*base, *flags) as server:
        yield server


def body(prompt: str = "the river", num_tokens: int = 100, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens, "temperature": 0, "stream": True} | fields


async def ask(server: Server, prompt: str = "the river", num_tokens: int = 100, headers: Any = None, **fields: Any) -> Reply:
    return await post(server, COMPLETE, body(prompt, num_tokens, **fields), headers=headers)


def reason(reply: Reply) -> str:
    return reply.headers.get("x-headrace-reject-reason", "")


def code(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"]) if reply.body else ""


def seconds(reply: Reply) -> float:
    return reply.ended - reply.sent


async def warm(server: Server, num_requests: int = 3, headers: Any = INTERACTIVE) -> None:
    """Let admission measure: some requests of a second, one after the other through the one place."""
    replies = await asyncio.gather(*(ask(server, f"warm {number}", headers=headers) for number in range(num_requests)))
    assert [reply.status for reply in replies] == [200] * num_requests


def test_an_overload_is_refused_at_once_and_let_in_when_told(tmp_path: pathlib.Path) -> None:
    """Twelve seconds of work for a class whose first tokens are due in two: most are refused, and all are served in the end."""
    with one_place(tmp_path) as server:

        async def persist(number: int) -> list[Reply]:
            replies: list[Reply] = []
            while not replies or (replies[-1].status != 200 and len(replies) < 8):
                if replies:
                    await asyncio.sleep(int(replies[-1].headers["retry-after"]))
                replies.append(await ask(server, f"stone {number}", headers=INTERACTIVE))
            return replies

        async def run() -> tuple[list[list[Reply]], dict[str, float], dict[str, float]]:
            await warm(server)
            before = server.metrics()
            calls = await asyncio.gather(*(persist(number) for number in range(12)))
            return calls, before, server.metrics()

        calls, before, after = asyncio.run(run())
        refused = [reply for replies in calls for reply in replies if reply.status != 200]
        assert len(refused) >= 6
        assert {reply.status for reply in refused} == {503}
        assert {reason(reply) for reply in refused} == {"predicted_ttft"}
        assert max(map(seconds, refused)) < 0.5, "a refusal waits for nobody: a request takes a second"
        served = [replies[-1] for replies in calls if replies[-1].status == 200]
        assert len(served) == 12
        assert sum(len(replies) <= 3 for replies in calls) >= 9, "mostly who waits as told is let in when it comes again"

        def grown(name: str) -> float:
            return after[name] - before[name]

        assert grown("headrace_requests_started_total") == 12
        prompts = sum(reply.usage["prompt_tokens"] for reply in served if reply.usage)
        computed = grown("headrace_prompt_tokens_total") + grown("headrace_prompt_tokens_cached_total")
        assert prompts == 0 or computed == prompts, "the worker never saw a prompt that was refused"
        assert after['headrace_rejections_total{reason="predicted_ttft"}'] == len(refused)
        assert after["headrace_admission_promises"] == 0


def test_the_heavy_tenant_hears_429_and_the_light_one_is_served(tmp_path: pathlib.Path) -> None:
    heavy, light = ({"x-headrace-tenant": name} | INTERACTIVE for name in ("heavy", "light"))
    with one_place(tmp_path, TENANTS + "[classes.interactive]\nttft_target_ms = 6000\n") as server:

        async def run() -> tuple[list[Reply], list[Reply]]:
            await warm(server)
            crowd = [asyncio.create_task(ask(server, "mill 0", headers=heavy))]
            await asyncio.sleep(0.3)
            few = [asyncio.create_task(ask(server, "a", headers=light))]
            await asyncio.sleep(0.1)
            for number in range(15):
                crowd.append(asyncio.create_task(ask(server, f"mill wheel {number}", headers=heavy)))
                await asyncio.sleep(0.02)
            return await asyncio.gather(*crowd), await asyncio.gather(*few)

        crowd, few = asyncio.run(run())
        assert [reply.status for reply in few] == [200]
        refused = [reply for reply in crowd if reply.status != 200]
        assert refused
        assert {(reply.status, code(reply), reason(reply)) for reply in refused} == {(429, "tenant_over_share", "tenant_share")}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)


def test_background_work_is_shed_while_interactive_requests_wait(tmp_path: pathlib.Path) -> None:
    with one_place(tmp_path) as server:

        async def run() -> tuple[list[Reply], list[Reply]]:
            await warm(server)
            urgent = [asyncio.create_task(ask(server, f"wheel {number}", headers=INTERACTIVE)) for number in range(8)]
            await asyncio.sleep(0.2)
            tasks = [asyncio.create_task(ask(server, f"b {n}", 5, headers={"x-headrace-class": "batch"})) for n in range(20)]
            batch = await asyncio.gather(*tasks)
            return await asyncio.gather(*urgent), batch

        urgent, batch = asyncio.run(run())
        assert any(reply.status == 200 for reply in urgent)
        shed = [reply for reply in batch if reply.status != 200]
        assert shed
        assert {(reply.status, reason(reply)) for reply in shed} == {(503, "shed")}


def test_a_timeout_ends_a_request_wherever_it_is(tmp_path: pathlib.Path) -> None:
    """In the queue and in the middle of its answer, at about the time that was asked for; at the door when it is hopeless."""
    with one_place(tmp_path) as server:

        async def run() -> tuple[Reply, Reply, Reply, Reply]:
            busy = asyncio.create_task(ask(server, "busy", 300))
            await asyncio.sleep(0.2)
            queued, named = await asyncio.gather(
                ask(server, "queued", timeout=1, stream=False),
                ask(server, "named", headers={"x-headrace-timeout": "1.0"}, stream=False),
            )
            await busy
            running = await ask(server, "running", 1000, timeout=1)
            await warm(server, headers=None)
            busy = asyncio.create_task(ask(server, "busy again", 200))
            await asyncio.sleep(0.2)
            fill = [asyncio.create_task(ask(server, f"fill {number}", 100)) for number in range(3)]
            await asyncio.sleep(0.2)
            hopeless = await ask(server, "hopeless", timeout=0.5, stream=False)
            await asyncio.gather(busy, *fill)
            return queued, named, running, hopeless

        queued, named, running, hopeless = asyncio.run(run())
        for reply in (queued, named):
            assert (reply.status, code(reply)) == (503, "deadline_exceeded")
            assert 0.9 < seconds(reply) < 1.9
        assert (running.status, running.num_errors, running.num_done) == (200, 1, 1)
        assert code(running) == "deadline_exceeded"
        assert 10 < len(running.texts) < 150
        assert 0.9 < seconds(running) < 1.9
        assert (hopeless.status, code(hopeless), reason(hopeless)) == (503, "overloaded", "predicted_ttft")
        assert "timeout" in json.loads(hopeless.body)["error"]["message"]
        assert seconds(hopeless) < 0.5


def test_sch_16_a_queue_timeout_is_noticed_while_the_model_is_busy(tmp_path: pathlib.Path) -> None:
    """SCH-16: limit 1 s in the queue, one job of 10 s, one queued: it is refused at about 1 s, and the job goes on."""
    with one_place(tmp_path, "[classes.standard]\nqueue_timeout_ms = 1000\n") as server:

        async def run() -> tuple[Reply, Reply]:
            job = asyncio.create_task(ask(server, "job", 1000))
            await asyncio.sleep(0.5)
            queued = await ask(server, "queued", stream=False)
            return await job, queued

        job, queued = asyncio.run(run())
        assert (queued.status, code(queued)) == (503, "deadline_exceeded")
        assert "waited" in json.loads(queued.body)["error"]["message"]
        assert 0.9 < seconds(queued) < 1.9
        assert (job.status, job.finish_reason, job.num_errors) == (200, "length", 0)


def test_sch_17_rat_07_exactly_what_fits_is_accepted(tmp_path: pathlib.Path) -> None:
    """SCH-17, RAT-07: one place and a queue of four take five of twenty that come at once; the rest hears 503."""
    with one_place(tmp_path, "", "--max-queued-requests", "4", "--admission", "bounds") as server:

        async def run() -> list[Reply]:
            return await asyncio.gather(*(ask(server, f"stone {number}", 30) for number in range(20)))

        replies = asyncio.run(run())
        refused = [reply for reply in replies if reply.status != 200]
        assert len(refused) == 15
        for reply in refused:
            assert (reply.status, code(reply), reason(reply)) == (503, "overloaded", "queue_full")
            assert int(reply.headers["retry-after"]) >= 1
        assert all(reply.finish_reason == "length" for reply in replies if reply.status == 200)


def test_rat_08_three_hundred_at_once_are_answered_or_refused(tmp_path: pathlib.Path) -> None:
    """RAT-08: 503 or 429, never 500; every accepted one has its whole answer, every choice of a call or none."""
    flags = ("--model", "sim:step_ms=2", "--served-model-name", "sim", "--max-num-seqs", "8", "--max-queued-requests", "32")
    with serving(*flags) as server:

        async def run() -> list[Reply]:
            calls = (ask(server, f"stone {number}", 10, n=1 + number % 3, stream=False) for number in range(300))
            return await asyncio.gather(*calls)

        replies = asyncio.run(run())
        assert {reply.status for reply in replies} == {200, 503}
        for number, reply in enumerate(replies):
            if reply.status == 200:
                choices = json.loads(reply.body)["choices"]
                assert [choice["finish_reason"] for choice in choices] == ["length"] * (1 + number % 3)
            else:
                assert reason(reply)
                assert int(reply.headers["retry-after"]) >= 1


def test_the_official_client_comes_again_as_told(tmp_path: pathlib.Path) -> None:
    """With its own retries it is served; without, it raises InternalServerError for a full server."""
    with one_place(tmp_path, "", "--max-queued-requests", "0") as server:

        async def run() -> str:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5)
            busy = asyncio.create_task(ask(server, "busy", 100))
            await asyncio.sleep(0.3)
            with pytest.raises(openai.InternalServerError) as caught:
                await client.with_options(max_retries=0).completions.create(model="sim", prompt="Hi", max_tokens=4)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            answer = await client.completions.create(model="sim", prompt="Hi", max_tokens=4)
            assert (await busy).finish_reason == "length"
            await client.close()
            return str(answer.choices[0].finish_reason)

        assert asyncio.run(run()) == "length"


def test_sch_11_a_light_tenant_starts_within_a_few_completions(tmp_path: pathlib.Path) -> None:
    """SCH-11: 200 requests of one tenant wait; one of another is served after a bounded number of theirs."""
    flags = ("--max-queued-requests", "400", "--admission", "bounds")
    with one_place(tmp_path, TENANTS, *flags) as server:

        async def run() -> tuple[list[Reply], Reply]:
            heavy = {"x-headrace-tenant": "heavy"}
            crowd = [asyncio.create_task(ask(server, f"mill {number}", 10, headers=heavy)) for number in range(200)]
            await asyncio.sleep(1.0)
            single = await ask(server, "one", 10, headers={"x-headrace-tenant": "light"})
            return await asyncio.gather(*crowd), single

        crowd, single = asyncio.run(run())
        assert single.status == 200
        meanwhile = [reply for reply in crowd if reply.status == 200 and single.sent < reply.ended < single.stamps[0]]
        assert len(meanwhile) <= 4
