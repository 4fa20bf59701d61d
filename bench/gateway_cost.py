"""CPU microseconds of the gateway process per streamed token, with the simulated model.

    python bench/gateway_cost.py [--streams 64] [--tokens-per-second 5000] [--seconds 15]

User and system time of the gateway process alone (psutil), over the middle of a run of steady streams.
bench/gateway_stages.py says where the user time goes.
"""

import argparse
import asyncio
import random

from harness import Reply, cpu_seconds, post, random_prompt, resident_mib, serving, table


async def drive(server, num_streams: int, seconds: float) -> dict[str, float]:
    """CPU microseconds per token, user and system apart; tokens per second; CPU microseconds per second when idle."""
    rng = random.Random(1)
    replies: list[Reply] = []
    stopping = False

    async def client() -> None:
        while not stopping:
            body = {"model": "sim", "prompt": random_prompt(rng, 40), "max_tokens": 400, "ignore_eos": True, "stream": True}
            replies.append(await post(server, "/v1/completions", body))

    gateway = server.gateway
    before = cpu_seconds(gateway)
    await asyncio.sleep(3)
    idle = (cpu_seconds(gateway) - before) / 3 * 1e6
    tasks = [asyncio.create_task(client()) for _ in range(num_streams)]
    await asyncio.sleep(3)
    metric = "headrace_generation_tokens_total"
    tokens_before, cpu_before, started = server.metrics()[metric], gateway.cpu_times(), asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    cpu_after, tokens = gateway.cpu_times(), server.metrics()[metric] - tokens_before
    wall = asyncio.get_running_loop().time() - started
    stopping = True
    await asyncio.gather(*tasks)
    failed = [reply for reply in replies if reply.status != 200 or reply.num_done != 1 or reply.num_errors]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(replies)} streams failed: {failed[0]}")
    user, system = cpu_after.user - cpu_before.user, cpu_after.system - cpu_before.system
    return {"user": user / tokens * 1e6, "system": system / tokens * 1e6, "rate": tokens / wall, "idle": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens-per-second", type=float, default=5000)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    step_ms = 1000 * args.streams / args.tokens_per_second
    with serving(
        "--model", f"sim:step_ms={step_ms:.3f},token_us=0", "--served-model-name", "sim", "--max-num-seqs", str(args.streams)
    ) as server:
        found = asyncio.run(drive(server, args.streams, args.seconds))
        cost = [f"{found['user'] + found['system']:.1f}", f"{found['user']:.1f}", f"{found['system']:.1f}"]
        row = [
            args.streams,
            f"{found['rate']:.0f}",
            *cost,
            f"{found['idle'] / 1e4:.2f} %",
            f"{resident_mib(server.gateway):.0f}",
        ]
    header = [
        "streams",
        "tokens/s",
        "gateway CPU us/token",
        "of it user",
        "of it system",
        "gateway idle CPU",
        "gateway RSS MiB",
    ]
    print(table(header, [row]))


if __name__ == "__main__":
    main()
