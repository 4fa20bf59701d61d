"""Full collections are rare in a worker, and cycles are freed when it rests. gc's settings are global: a process of its own."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
import gc, weakref
from headrace.worker.garbage import FULL_THRESHOLD, collect_now, keep_pauses_short

class Node: pass

young, middle, _ = gc.get_threshold()
keep_pauses_short()
assert gc.get_threshold() == (young, middle, FULL_THRESHOLD)
assert gc.get_freeze_count() > 1000
node = Node(); node.self = node; seen = weakref.ref(node); del node
gc.collect(1)  # it is old now or gone
collect_now()
assert seen() is None and gc.isenabled()
print("good")
"""


def test_pauses_are_kept_short_and_cycles_are_freed():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "good\n"
