"""When the worker's garbage is collected: between bursts of work, hardly ever during one.

Owns: keep_pauses_short, collect_now. Runs in: worker, benchmarks. Must not know: what is allocated.

A full collection walks every object: with thousands of long prompts waiting it takes a tenth of a second, and every stream
waits for it. Nearly all that a worker drops is freed by counting references; what is left are cycles (of exceptions with their
tracebacks, say), and those can wait until nobody does.
"""

import gc

FULL_THRESHOLD = 1_000  # collections of the middle generation before a full one; Python's own number is 10


def keep_pauses_short() -> None:
    """Call once, when all is set up: what lives as long as the process is not looked at again, full collections are rare."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_THRESHOLD)


def collect_now() -> None:
    """A full collection; for when nobody waits."""
    gc.collect()
