"""Two real processes on a ring, one of them killed with SIGKILL again and again."""

import json
import pathlib
import subprocess
import sys

import pytest

DRIVER = pathlib.Path(__file__).with_name("crash_driver.py")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["producer", "consumer", "both"])
def test_killed_at_random_points(mode):
    """Published records arrive whole, once, in order; a killed consumer takes at most the one record it had popped with it."""
    done = subprocess.run([sys.executable, str(DRIVER), mode, "4", "1"], capture_output=True, text=True, timeout=60, check=True)
    summary = json.loads(done.stdout)
    assert summary["num_producer_kills"] + summary["num_consumer_kills"] > 50
    assert summary["num_delivered"] > 1000
    wrong = ("num_torn", "num_disordered", "num_repeated", "num_invented", "num_left")
    assert {key: summary[key] for key in wrong} == dict.fromkeys(wrong, 0), summary
    if mode == "producer":
        assert summary["num_missing"] == 0
    else:
        assert summary["num_missing"] <= summary["num_consumer_kills"]
