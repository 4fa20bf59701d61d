"""Greedy text under heavy preemption against the same without, over HTTP: how many of twelve long answers are equal.

    python bench/exactness.py            # int8 activations, the default
    python bench/exactness.py --exact    # --no-quantize-activations

Both with a KV cache of f32. Exits with 1 when nothing was preempted, an answer is short, or --exact finds a difference.
"""

import argparse
import asyncio
import sys

from harness import closed_loop, serving

PROMPTS, OUTPUT_TOKENS = 12, 220
AMPLE_GIB, TIGHT_GIB = 1.6, 0.06


def answers(flags: list[str], kv_gib: float) -> tuple[list[str], float]:
    """Texts by prompt, and how often a request was preempted."""
    bodies = [
        {
            "model": "m",
            "prompt": f"Chapter {number}. The old miller walked to the river and",
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(PROMPTS)
    ]

    async def together() -> list:
        return await asyncio.gather(*(closed_loop(server, [body], 1) for body in bodies))

    with serving("--served-model-name", "m", "--kv-cache-precision", "f32", "--kv-cache-gib", str(kv_gib), *flags) as server:
        replies = [group[0] for group in asyncio.run(together())]
        preemptions = server.metrics()["headrace_num_preemptions_total"]
    for reply in replies:
        if reply.status != 200 or reply.num_done != 1 or reply.usage["completion_tokens"] != OUTPUT_TOKENS:
            raise SystemExit(f"an answer did not end as it should: {reply.status} {reply.body} {reply.usage}")
    return [reply.text for reply in replies], preemptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", action="store_true", help="with --no-quantize-activations")
    args = parser.parse_args()
    flags = ["--no-quantize-activations"] if args.exact else []
    ample, none = answers(flags, AMPLE_GIB)
    tight, preemptions = answers(flags, TIGHT_GIB)
    equal = sum(one == other for one, other in zip(ample, tight, strict=True))
    print(f"{equal} of {PROMPTS} texts equal; preemptions {none:.0f} and {preemptions:.0f}")
    return 1 if not preemptions or none or (args.exact and equal != PROMPTS) else 0


if __name__ == "__main__":
    sys.exit(main())
