"""Mixed traffic on a real server: what steady streams feel when long prompts come, light tenants beside heavy ones, overload.

    python bench/mixed_traffic.py steady  [--rounds 4] [--seconds 30] [--prompt-tokens 1500]
    python bench/mixed_traffic.py tenants [--seconds 60]
    python bench/mixed_traffic.py overload [--seconds 90] [--factor 1.5]

steady: two servers with the same model stay up; the same load goes to one and the other in turn, so that the machine's noise
meets both: 8 streams that never end, and a long prompt every few seconds. One server chunks prompts so that steps stay under
the TBT target (the default), the other computes prompts whole.
tenants: a light tenant alone, then beside one that sends ten times as much, on one server.
overload: interactive and batch requests at a multiple of the measured capacity; refused callers wait as told and come again;
beside it the same load on a server that serves first come, first served and refuses nobody.
"""

import argparse
import asyncio
import contextlib
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from harness import Reply, Server, median, percentile, post, random_prompt, serving, table

COMPLETE = "/v1/completions"
MODEL = "SmolLM2-135M-Instruct"
INTERACTIVE = {"x-headrace-class": "interactive"}  # its TBT target is 150 ms
UNCHUNKED = """
[scheduler]
max_num_batched_tokens = 8192
step_time_budget = false
[server]
admission = "bounds"
"""


@contextlib.contextmanager
def configured(text: str, *flags: str):
    """A server with a configuration file of this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "headrace.toml"
        path.write_text(text)
        with serving("--config", str(path), *flags) as server:
            yield server


def body(prompt: str, max_tokens: int, **fields: object) -> dict:
    usage = {"include_usage": True}
    common = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return common | {"stream_options": usage} | fields


@dataclass
class Phase:
    """What one phase on one server gave."""

    gaps: list[float] = field(default_factory=list)
    long_ttfts: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0


async def steady_phase(server: Server, seconds: float, prompt_words: int, every: float, rng: random.Random) -> Phase:
    """8 streams, and a long prompt every few seconds; only what lies within the phase counts."""
    phase = Phase()
    end = time.monotonic() + seconds

    async def stream() -> None:
        while time.monotonic() < end:
            reply = await post(server, COMPLETE, body(random_prompt(rng, 8), 400), headers=INTERACTIVE)
            check(reply)
            phase.gaps += [after - before for before, after in pairwise(reply.stamps)]
            phase.num_tokens += len(reply.stamps)

    async def prompts() -> None:
        await asyncio.sleep(1.0)
        while time.monotonic() < end - 2:
            began = time.monotonic()
            reply = await post(server, COMPLETE, body(random_prompt(rng, prompt_words), 4), headers=INTERACTIVE)
            check(reply)
            phase.long_ttfts.append(reply.stamps[0] - reply.sent)
            phase.num_tokens += len(reply.stamps)
            phase.num_prompt_tokens += (reply.usage or {}).get("prompt_tokens", 0)
            await asyncio.sleep(max(0.0, every - (time.monotonic() - began)))

    began = time.monotonic()
    await asyncio.gather(*(stream() for _ in range(8)), prompts())
    phase.seconds = time.monotonic() - began
    return phase


def check(reply: Reply) -> None:
    if reply.status != 200 or reply.num_errors or not reply.stamps:
        raise RuntimeError(f"status {reply.status}: {reply.body[:300]} {reply.fault}")


def steady(arguments: argparse.Namespace) -> int:
    words = round(arguments.prompt_tokens / 1.05)
    found: dict[str, list[Phase]] = {"chunked": [], "whole prompts": []}
    with serving() as chunked, configured(UNCHUNKED) as whole:
        servers = {"chunked": chunked, "whole prompts": whole}
        for server in servers.values():
            asyncio.run(steady_phase(server, 6, words, 3, random.Random(0)))  # warm: shapes compiled, rates measured
        for number in range(arguments.rounds):
            order = list(servers) if number % 2 == 0 else list(reversed(servers))
            for name in order:
                rng = random.Random(number + 1)
                phase = asyncio.run(steady_phase(servers[name], arguments.seconds, words, arguments.every, rng))
                found[name].append(phase)
                print(f"{name}: round {number + 1}: p99 gap {percentile(phase.gaps, 0.99) * 1e3:.0f} ms", flush=True)
    rows = []
    figures = {}
    for name, phases in found.items():
        gaps = [gap for phase in phases for gap in phase.gaps]
        ttfts = [ttft for phase in phases for ttft in phase.long_ttfts]
        seconds = sum(phase.seconds for phase in phases)
        rate = sum(phase.num_tokens for phase in phases) / seconds
        figures[name] = (percentile(gaps, 0.99), max(gaps), median(ttfts), rate)
        prompt_rate = sum(phase.num_prompt_tokens for phase in phases) / seconds
        rows.append(
            [
                name,
                f"{percentile(gaps, 0.5) * 1e3:.0f}",
                f"{percentile(gaps, 0.99) * 1e3:.0f}",
                f"{max(gaps) * 1e3:.0f}",
                f"{median(ttfts):.2f}",
                f"{rate:.0f}",
                f"{prompt_rate:.0f}",
                len(ttfts),
            ]
        )
    header = ["", "gap p50 ms", "gap p99 ms", "gap max ms", "long TTFT s", "output tok/s", "prompt tok/s", "long prompts"]
    print(table(header, rows))
    chunked_figures, whole_figures = figures["chunked"], figures["whole prompts"]
    print(f"p99 gap: {whole_figures[0] / chunked_figures[0]:.1f} times smaller; target 5 times")
    print(f"p99 gap over the TBT target of 150 ms: {chunked_figures[0] / 0.15:.2f}; target at most 2")
    print(f"output throughput: {chunked_figures[3] / whole_figures[3]:.2f} of whole prompts'; target at least 0.9")
    print(f"long prompt's TTFT: {chunked_figures[2] / whole_figures[2]:.2f} times; target at most 1.3")
    return 0


TENANTS = """
[tenants.light]
weight = 1.0
[tenants.heavy]
weight = 1.0
"""


@dataclass
class TenantRun:
    """Replies by tenant, and tokens served by second."""

    ttfts: dict[str, list[float]] = field(default_factory=dict)
    served: list[tuple[float, str, int]] = field(default_factory=list)
    refused: int = 0


async def tenant_load(
    server: Server, rates: dict[str, float], seconds: float, headers_of: Callable[[str], dict[str, str]]
) -> TenantRun:
    """Open loop: each tenant sends at its rate for so long."""
    run = TenantRun()
    rng = random.Random(7)

    async def one(tenant: str) -> None:
        reply = await post(server, COMPLETE, body(random_prompt(rng, 150), 40), headers=headers_of(tenant))
        if reply.status != 200:
            run.refused += 1
            return
        check(reply)
        run.ttfts.setdefault(tenant, []).append(reply.stamps[0] - reply.sent)
        prompt_tokens = (reply.usage or {}).get("prompt_tokens", 0)
        run.served.append((reply.stamps[0], tenant, prompt_tokens))
        run.served += [(stamp, tenant, 2) for stamp in reply.stamps]

    async def arrivals(tenant: str, rate: float) -> None:
        source = random.Random(tenant)
        tasks = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(one(tenant)))
            await asyncio.sleep(source.expovariate(rate))
        await asyncio.gather(*tasks)

    await asyncio.gather(*(arrivals(tenant, rate) for tenant, rate in rates.items()))
    return run


async def saturated(server: Server, num_clients: int, seconds: float, headers: dict[str, str]) -> tuple[float, float]:
    """Requests and tokens a second with so many clients that never wait."""
    rng = random.Random(5)
    end = time.monotonic() + seconds
    counts = [0, 0]

    async def client() -> None:
        while time.monotonic() < end:
            reply = await post(server, COMPLETE, body(random_prompt(rng, 150), 40), headers=headers)
            check(reply)
            counts[0] += 1
            counts[1] += len(reply.stamps)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    took = time.monotonic() - began
    return counts[0] / took, counts[1] / took


async def backlogged(server: Server, clients: dict[str, int], seconds: float) -> TenantRun:
    """Closed loop: each tenant keeps so many requests in flight, more than the server runs."""
    run = TenantRun()
    rng = random.Random(9)
    end = time.monotonic() + seconds

    async def client(tenant: str) -> None:
        while time.monotonic() < end:
            headers = {"x-headrace-tenant": tenant, "x-headrace-class": "standard"}
            reply = await post(server, COMPLETE, body(random_prompt(rng, 150), 40), headers=headers)
            if reply.status != 200:
                run.refused += 1
                await asyncio.sleep(0.2)
                continue
            run.served.append((reply.stamps[0], tenant, (reply.usage or {}).get("prompt_tokens", 0)))
            run.served += [(stamp, tenant, 2) for stamp in reply.stamps]

    await asyncio.gather(*(client(tenant) for tenant, number in clients.items() for _ in range(number)))
    return run


def jain(values: list[float]) -> float:
    """Jain's index: 1 when all are equal."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 1.0


def tenants(arguments: argparse.Namespace) -> int:
    flags = ("--max-num-seqs", "16")
    first_come = '[scheduler]\npolicy = "fcfs"\n'
    with configured(TENANTS, *flags) as server, configured(first_come + TENANTS, *flags) as fcfs:
        named = lambda tenant: {"x-headrace-tenant": tenant, "x-headrace-class": "interactive"}  # noqa: E731
        capacity, _ = asyncio.run(saturated(server, 16, 10, named("light")))
        light_rate = 0.09 * capacity
        seconds = arguments.seconds
        alone = asyncio.run(tenant_load(server, {"light": light_rate}, seconds, named))
        both = asyncio.run(tenant_load(server, {"light": light_rate, "heavy": 10 * light_rate}, seconds, named))
        both_fcfs = asyncio.run(tenant_load(fcfs, {"light": light_rate, "heavy": 10 * light_rate}, seconds, named))
    ours, theirs, windows = [], [], []
    flags = (*flags, "--admission", "bounds")  # a door that refuses the excess would leave a tenant without a backlog at times
    with configured(TENANTS, *flags) as server, configured(first_come + TENANTS, *flags) as fcfs:
        for target in (server, fcfs):
            asyncio.run(saturated(target, 16, 5, named("light")))  # both warm
        for _ in range(3):
            run = asyncio.run(backlogged(server, {"light": 24, "heavy": 48}, 24))
            ours.append(sum(weight == 2 for _, _, weight in run.served) / 24)
            windows += jain_windows(run)
            run = asyncio.run(backlogged(fcfs, {"light": 24, "heavy": 48}, 24))
            theirs.append(sum(weight == 2 for _, _, weight in run.served) / 24)
    print(f"capacity {capacity:.1f} requests/s; light sends {light_rate:.2f}, heavy {10 * light_rate:.2f} requests/s")
    rows = [
        [name, len(ttfts), *(f"{percentile(ttfts, share):.3f}" for share in (0.5, 0.9, 0.99)), run.refused]
        for name, run in (("alone", alone), ("beside heavy", both), ("beside heavy, fcfs", both_fcfs))
        for ttfts in [run.ttfts["light"]]
    ]
    print(table(["light tenant", "requests", "TTFT p50 s", "TTFT p90 s", "TTFT p99 s", "refused (all)"], rows))
    ratio = percentile(both.ttfts["light"], 0.99) / percentile(alone.ttfts["light"], 0.99)
    print(f"p99 TTFT beside heavy: {ratio:.2f} times alone; target at most 1.3 plus one step")
    print(f"Jain index of weighted service over 10 s windows, both backlogged: worst {min(windows):.3f}; target 0.95")
    print(f"output tokens/s: {median(ours) / median(theirs):.3f} of first come, first served; target at least 0.97")
    return 0


def jain_windows(run: TenantRun) -> list[float]:
    """Over whole windows of 10 s, the first 4 s left out (the queue has to fill)."""
    start = min(at for at, _, _ in run.served) + 4
    found = []
    for window in range(2):
        low, high = start + 10 * window, start + 10 * (window + 1)
        shares = {"light": 0.0, "heavy": 0.0}
        for at, tenant, cost in run.served:
            if low <= at < high:
                shares[tenant] += cost
        found.append(jain(list(shares.values())))
    return found


@dataclass
class Call:
    """One caller's tries."""

    service_class: str
    ttft: float | None = None
    worst_gap: float = 0.0
    num_tries: int = 0
    was_admitted: list[bool] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


async def overload_phase(server: Server, rates: dict[str, float], seconds: float, max_tries: int) -> list[Call]:
    """Open loop by class; who is refused waits as told and comes again."""
    calls: list[Call] = []
    rng = random.Random(3)

    async def one(name: str) -> None:
        call = Call(name)
        calls.append(call)
        payload = body(random_prompt(rng, 150), 40)
        while call.num_tries < max_tries:
            call.num_tries += 1
            reply = await post(server, COMPLETE, payload, headers={"x-headrace-class": name})
            call.was_admitted.append(reply.status == 200)
            if reply.status == 200:
                if reply.stamps and not reply.num_errors:
                    call.ttft = reply.stamps[0] - reply.sent
                    call.worst_gap = max((after - before for before, after in pairwise(reply.stamps)), default=0.0)
                return
            call.reasons.append(reply.headers.get("x-headrace-reject-reason", str(reply.status)))
            await asyncio.sleep(float(reply.headers.get("retry-after", "1")))

    async def arrivals(name: str, rate: float) -> list[asyncio.Task[None]]:
        source = random.Random(name)
        tasks = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(one(name)))
            await asyncio.sleep(source.expovariate(rate))
        return tasks

    started = await asyncio.gather(*(arrivals(name, rate) for name, rate in rates.items()))
    await asyncio.wait_for(asyncio.gather(*(task for tasks in started for task in tasks)), 300)
    return calls


def overload(arguments: argparse.Namespace) -> int:
    flags = ("--max-num-seqs", "16")
    fcfs_text = '[scheduler]\npolicy = "fcfs"\n[server]\nadmission = "bounds"\n'
    results = {}
    with configured("", *flags) as server, configured(fcfs_text, *flags) as fcfs:
        capacity, _ = asyncio.run(saturated(server, 16, 12, {}))
        offered = arguments.factor * capacity
        rates = {"interactive": 0.6 * offered, "batch": 0.4 * offered}
        print(f"capacity {capacity:.1f} requests/s, offered {offered:.1f}", flush=True)
        for name, target in (("headrace", server), ("fcfs", fcfs)):
            results[name] = asyncio.run(overload_phase(target, rates, arguments.seconds, 1 if name == "fcfs" else 4))
    rows = []
    goodputs = {}
    for name, calls in results.items():
        interactive = [call for call in calls if call.service_class == "interactive"]
        background = [call for call in calls if call.service_class == "batch"]
        met = [call for call in interactive if call.was_admitted[0] and call.ttft is not None and call.ttft <= 2.0]
        offered_tries = sum(call.num_tries for call in interactive)
        all_met = [call for call in interactive if call.ttft is not None and call.ttft <= 2.0]
        goodputs[name] = len(all_met) / offered_tries
        returned = [admitted for call in calls for admitted in call.was_admitted[1:]]
        ttfts = [call.ttft for call in interactive if call.ttft is not None]
        rows.append(
            [
                name,
                len(interactive),
                f"{len(met) / len(interactive):.3f}",
                f"{goodputs[name]:.3f}",
                f"{percentile(ttfts, 0.99):.2f}",
                f"{sum(call.ttft is not None for call in background)} of {len(background)}",
                f"{sum(returned)} of {len(returned)}",
            ]
        )
    header = [
        "",
        "interactive callers",
        "met at the first try",
        "goodput (tries in the denominator)",
        "TTFT p99 s",
        "batch answered",
        "let in when they came again",
    ]
    print(table(header, rows))
    print(f"interactive goodput: {goodputs['headrace'] / max(goodputs['fcfs'], 1e-9):.1f} times fcfs; target 3")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("steady")
    one.add_argument("--rounds", type=int, default=4)
    one.add_argument("--seconds", type=float, default=30)
    one.add_argument("--every", type=float, default=2.0)
    one.add_argument("--prompt-tokens", type=int, default=1500)
    two = commands.add_parser("tenants")
    two.add_argument("--seconds", type=float, default=60)
    three = commands.add_parser("overload")
    three.add_argument("--seconds", type=float, default=90)
    three.add_argument("--factor", type=float, default=1.5)
    arguments = parser.parse_args()
    return {"steady": steady, "tenants": tenants, "overload": overload}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
