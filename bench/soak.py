"""Many requests of mixed lengths, a third of the clients leaving midway: nothing may be lost, left over or growing.

    python bench/soak.py [--requests 2000] [--clients 32] [--model sim:step_ms=4]      (default: the embedded model)

Exits with 1 when a request did not end exactly once, a block is still in use, or a process grew after warm-up.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator

from harness import Server, post, random_prompt, resident_mib, serving, table

WARM_UP_SHARE = 0.5  # until every kind of step has been met, those of an emptying batch included
MAX_GROWTH_MIB = 16  # of each process, from the idle moment after the warm-up to the one at the end


def body(rng: random.Random, model: str) -> dict:
    return {
        "model": model,
        "prompt": random_prompt(rng, rng.choice([3, 10, 40, 120, 300])),
        "max_tokens": rng.choice([1, 4, 16, 48]),
        "temperature": rng.choice([0, 0.8]),
        "ignore_eos": rng.random() < 0.7,
        "stream": rng.random() < 0.8,
        "stop": rng.choice([None, ["zzz never"], [" the"]]),
    }


async def soak(server: Server, num_requests: int, num_clients: int, model: str) -> tuple[list[str], list[list[str]]]:
    """(what went wrong, memory rows)."""
    rng = random.Random(7)
    faults: list[str] = []
    memory: list[tuple[int, float, float]] = []
    counts = {"ended": 0, "left": 0}
    num_warm_up = round(WARM_UP_SHARE * num_requests)
    started = time.monotonic()

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            request = body(rng, model)
            leaves = number % 3 == 0
            if leaves and not request["stream"]:
                task = asyncio.create_task(post(server, "/v1/completions", request))
                await asyncio.sleep(rng.random() * 0.2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                counts["left"] += 1
            else:
                reply = await post(server, "/v1/completions", request, leave_after=rng.randint(1, 3) if leaves else None)
                check(reply, request, leaves, faults)
                counts["left" if leaves else "ended"] += 1
            done = counts["ended"] + counts["left"]
            if done % 100 == 0:
                memory.append((done, resident_mib(server.gateway), resident_mib(server.worker)))
                seconds = time.monotonic() - started
                print(
                    f"{done}/{num_requests} after {seconds:.0f} s, MiB: gateway {memory[-1][1]:.0f}, worker {memory[-1][2]:.0f}"
                )

    idle: list[tuple[float, float]] = []  # memory when nothing runs: after the warm-up, and at the end
    for numbers in (iter(range(num_warm_up)), iter(range(num_warm_up, num_requests))):
        await asyncio.gather(*(client(numbers) for _ in range(num_clients)))
        await asyncio.sleep(1.5)
        faults += leftovers(server)
        idle.append((resident_mib(server.gateway), resident_mib(server.worker)))
        print(f"idle: gateway {idle[-1][0]:.0f} MiB, worker {idle[-1][1]:.0f} MiB")
    for column, name in enumerate(("gateway", "worker")):
        if idle[1][column] - idle[0][column] > MAX_GROWTH_MIB:
            faults.append(f"{name} grew from {idle[0][column]:.0f} to {idle[1][column]:.0f} MiB after warm-up")
    return faults, [[str(row[0]), f"{row[1]:.0f}", f"{row[2]:.0f}"] for row in memory]


def check(reply, request: dict, leaves: bool, faults: list[str]) -> None:
    if reply.status != 200 or reply.fault or reply.num_errors:
        faults.append(f"status {reply.status} {reply.fault} {reply.body[:200]}")
    elif request["stream"] and not leaves and (reply.num_done != 1 or reply.finish_reason is None):
        faults.append(f"a stream ended with {reply.num_done} [DONE] and finish_reason {reply.finish_reason}")


def leftovers(server: Server) -> list[str]:
    metrics = server.metrics()
    faults = []
    for name in ("headrace_num_requests_running", "headrace_num_requests_waiting", "headrace_kv_cache_usage_perc"):
        if metrics[name] != 0:
            faults.append(f"{name} is {metrics[name]} at the end")
    finished = sum(value for name, value in metrics.items() if name.startswith("headrace_request_success_total"))
    started = metrics["headrace_requests_started_total"]
    if finished != started:
        faults.append(f"{started:.0f} requests started, {finished:.0f} finished")
    print(
        f"started {started:.0f}, finished {finished:.0f}: "
        + ", ".join(
            f"{name.split('=')[-1].strip('}')} {value:.0f}"
            for name, value in metrics.items()
            if name.startswith("headrace_request_success_total")
        )
    )
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    flags = ["--served-model-name", "soak", "--max-num-seqs", "32", "--kv-cache-gib", "0.25"]
    with serving(*flags, *(["--model", args.model] if args.model else [])) as server:
        faults, memory = asyncio.run(soak(server, args.requests, args.clients, "soak"))
    print(table(["requests", "gateway MiB", "worker MiB"], memory))
    print("\n".join(faults[:20]) or "every request ended exactly once; nothing left in use; memory flat")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
