"""Start time, resident memory and idle CPU of each process with the embedded model.

python bench/footprint.py
"""

import asyncio
import random
import time

import psutil

from harness import closed_loop, cpu_seconds, random_prompt, resident_mib, serving, table

KV_GIB = 0.25


def main() -> None:
    rows = []
    with serving("--served-model-name", "m", "--kv-cache-gib", str(KV_GIB)):
        pass  # the first start may prepare the model
    with serving("--served-model-name", "m", "--kv-cache-gib", str(KV_GIB)) as server:
        processes = {"supervisor": psutil.Process(server.process.pid), "gateway": server.gateway, "worker": server.worker}
        rng = random.Random(5)
        fresh = {name: resident_mib(process) for name, process in processes.items()}
        bodies = [{"model": "m", "prompt": random_prompt(rng, 250), "max_tokens": 32, "stream": True} for _ in range(96)]
        asyncio.run(closed_loop(server, bodies, 32))
        loaded = {name: resident_mib(process) for name, process in processes.items()}
        time.sleep(2)
        before = {name: cpu_seconds(process) for name, process in processes.items()}
        time.sleep(20)
        for name, process in processes.items():
            idle = (cpu_seconds(process) - before[name]) / 20
            beside = f"{loaded[name] - KV_GIB * 1024:.0f}" if name == "worker" else ""
            rows.append([name, f"{fresh[name]:.0f}", f"{loaded[name]:.0f}", beside, f"{100 * idle:.2f} %"])
        print(f"second start to ready: {server.ready_seconds:.2f} s")
    print(
        table(
            ["process", "RSS MiB at start", "RSS MiB after 96 requests", f"less the {KV_GIB} GiB pool", "idle CPU of a core"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
