"""The executor contract, kept by the executors that ship: OpenVINO over a tiny random graph, and the simulated model."""

import pytest

from headrace.executors.openvino_paged import OpenVINOExecutor
from headrace.executors.simulated import SimulatedExecutor
from tests.contracts.executor_contract import ExecutorContract, MakeExecutor
from tests.executors.tiny_graph import MANIFEST, VOCAB_SIZE, tiny_graph


class TestOpenVINOExecutor(ExecutorContract):
    @pytest.fixture
    def make_executor(self) -> MakeExecutor:
        graph = tiny_graph()
        return lambda: OpenVINOExecutor.open(graph, MANIFEST, num_blocks=12, kv_precision="f32", max_num_threads=1)


class TestSimulatedExecutor(ExecutorContract):
    @pytest.fixture
    def make_executor(self) -> MakeExecutor:
        words = list(range(2, VOCAB_SIZE))
        return lambda: SimulatedExecutor.from_spec(
            "sim:block_size=8,num_blocks=12", MANIFEST, words, now_ns=lambda: 0, sleep=lambda seconds: None
        )
