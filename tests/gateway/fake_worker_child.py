"""A worker process whose model is the fake executor: its configuration as JSON on standard input, the step time as argument."""

import sys
import time

import msgspec

from headrace.protocol.ports import ExecutorSpec
from headrace.testing.fake_executor import FakeExecutor
from headrace.worker.config import WorkerConfig
from headrace.worker.process import run_worker

SPEC = ExecutorSpec(
    model_id="m",
    kv_format="f32",
    vocab_size=257,
    eos_token_ids=frozenset({256}),
    max_model_len=4096,
    block_size=16,
    num_blocks=2048,
)


def main():
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    step_seconds = float(sys.argv[1])
    return run_worker(
        config, lambda: FakeExecutor(SPEC, on_step=lambda _plan: time.sleep(step_seconds)), lambda _: "fake model"
    )


if __name__ == "__main__":
    sys.exit(main())
