"""Real processes: one server with the embedded model and one with the simulated model, shared by the tests that only read."""

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench"))

from harness import Server, serving


@pytest.fixture(scope="session")
def real_server() -> Iterator[Server]:
    """The embedded model. The first start on a machine prepares it."""
    with serving("--served-model-name", "smollm2", "--kv-cache-gib", "0.5", "--max-num-seqs", "16", quiet=False) as server:
        yield server


@pytest.fixture(scope="session")
def sim_server() -> Iterator[Server]:
    """A fast simulated model."""
    with serving("--model", "sim:step_ms=4", "--served-model-name", "sim", "--max-num-seqs", "32", quiet=False) as server:
        yield server
