"""kill -9 of the worker with streams open, then of everything: what clients see, and what stays behind.

python bench/kill_worker.py [--streams 32] [--model sim:step_ms=20]       (default: the embedded model)
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time

import psutil

from harness import post, random_prompt, serving, shared_memory_files


async def kill_worker(server, num_streams: int) -> list[str]:
    rng = random.Random(3)
    bodies = [
        {"model": "m", "prompt": random_prompt(rng, 30), "max_tokens": 1500, "ignore_eos": True, "stream": True}
        for _ in range(num_streams)
    ]
    tasks = [asyncio.create_task(post(server, "/v1/completions", body)) for body in bodies]
    await asyncio.sleep(4)
    os.kill(server.worker.pid, signal.SIGKILL)
    killed = time.monotonic()
    replies = await asyncio.gather(*tasks)
    faults = []
    late = max(reply.ended for reply in replies) - killed
    errors = [reply.num_errors for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status != 200]
    print(f"{num_streams} streams: all ended {late:.3f} s after the kill")
    print(f"error frames of each: {sorted(set(errors))}; refused with 503: {len(refused)}")
    if late > 3 or any(count != 1 for count in errors) or any(reply.status != 503 for reply in refused):
        faults.append("a stream did not end with one error frame within 3 s")
    if any(reply.num_done != 1 or reply.finish_reason for reply in replies if reply.status == 200):
        faults.append("a killed stream has no [DONE], or a finish_reason")
    await asyncio.to_thread(server.wait_ready, 30)
    print(f"ready again {time.monotonic() - killed:.2f} s after the kill")
    again = await post(server, "/v1/completions", {"model": "m", "prompt": "Hello", "max_tokens": 4})
    if again.status != 200:
        faults.append(f"after the restart: {again.status} {again.body}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    flags = ["--served-model-name", "m", "--kv-cache-gib", "0.5", *(["--model", args.model] if args.model else [])]
    with serving(*flags) as server:
        faults = asyncio.run(kill_worker(server, args.streams))
    left = shared_memory_files()
    print(f"in /dev/shm after an orderly stop: {left}")
    faults += [f"left behind: {name}" for name in left]
    with serving(*flags) as server:
        family = [psutil.Process(server.process.pid), server.gateway, server.worker]
        for process in family:
            process.kill()
        psutil.wait_procs(family, 5)
        print(f"in /dev/shm after kill -9 of everything: {len(shared_memory_files())} files")
        orphans = set(shared_memory_files())
    with serving(*flags):
        kept = orphans & set(shared_memory_files())
        print(f"of these after a new start: {len(kept)}")
        faults += [f"orphan not removed: {name}" for name in kept]
    faults += [f"left behind: {name}" for name in shared_memory_files()]
    print("\n".join(faults) or "as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
