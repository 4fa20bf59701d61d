"""Runs a pickled LoadPlan in this process, sends itself SIGINT once two requests are done, and pickles what came back.

    python interrupted_run.py PLAN RESULT

A process of its own, as with a person's Ctrl-C: the signal meets no thread of a library that other tests have loaded.
"""

import os
import pathlib
import pickle
import signal
import sys
import threading

from headrace.loadtest.engine import run_load
from headrace.loadtest.progress import LoadProgress


def main() -> None:
    plan = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
    before = signal.getsignal(signal.SIGINT)
    timers: list[threading.Timer] = []

    def on_progress(progress: LoadProgress) -> None:
        if progress.num_completed >= 2 and not timers:
            timers.append(threading.Timer(0, os.kill, (os.getpid(), signal.SIGINT)))
            timers[0].start()

    run = run_load(plan, on_progress=on_progress)
    is_restored = signal.getsignal(signal.SIGINT) is before
    pathlib.Path(sys.argv[2]).write_bytes(pickle.dumps((run, is_restored)))


if __name__ == "__main__":
    main()
