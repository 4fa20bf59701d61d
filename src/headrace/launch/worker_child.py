"""The worker process: `python -m headrace.launch.worker_child`, its configuration as JSON on standard input.

Owns: this process' entry point. Runs in: worker. Must not know: how a step is made.
"""

import sys

import msgspec

from headrace.launch.executor import build_executor, describe_executor
from headrace.launch.worker_launch import WorkerLaunch
from headrace.worker.process import run_worker


def main() -> int:
    """The worker's exit status."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerLaunch)
    return run_worker(launch.worker, lambda: build_executor(launch.settings, launch.model), describe_executor)


if __name__ == "__main__":
    sys.exit(main())
