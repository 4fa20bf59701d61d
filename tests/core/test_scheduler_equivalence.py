"""INV-10: what a request gets depends on the request alone, never on batching, chunking, blocks, memory or the cache."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace.protocol.messages import GenerationRequest
from tests.core.driver import VOCAB_SIZE, Driver, alone, make_request, make_spec

LONGEST = 64  # prompt + output of any request here


@dataclass(frozen=True)
class Shape:
    """How a trace is run; the outcome must not depend on it."""

    block_size: int = 4
    num_spare_blocks: int = 100  # beyond those that one longest request needs
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    enable_prefix_caching: bool = True
    policy: str = "headrace"
    min_chunk_tokens: int = 1

    def driver(self) -> Driver:
        spec = make_spec(
            num_blocks=-(-LONGEST // self.block_size) + self.num_spare_blocks, block_size=self.block_size, max_model_len=LONGEST
        )
        return Driver(
            spec,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.policy,
            min_chunk_tokens=self.min_chunk_tokens,
            class_aging_ns=10_000_000,
        )


def random_trace(seed: int, num_requests: int = 14) -> list[GenerationRequest]:
    """Requests with shared prefixes, of mixed lengths, greedy and drawn, with and without stop tokens."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, VOCAB_SIZE) for _ in range(24)] for _ in range(2)]
    trace = []
    for request_id in range(num_requests):
        prompt = prefixes[rng.randrange(2)][: rng.randrange(0, 25)] + [
            rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 10))
        ]
        max_tokens = rng.randrange(1, 30)
        trace.append(
            make_request(
                request_id,
                prompt,
                max_tokens=max_tokens,
                min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.3 else 0,
                stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.3 else (),
                ignore_eos=rng.random() < 0.5,
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.randrange(1000),
                cache_salt=rng.choice(["", "", "salt"]),
                service_class=rng.choice(["interactive", "standard", "batch"]),
                tenant_id=rng.choice(["default", "other"]),
                priority=rng.choice([0, 0, 1]),
            )
        )
    return trace


def run_trace(trace: list[GenerationRequest], shape: Shape, order: list[int], arrivals_per_step: int) -> Driver:
    """Add the requests in the given order, so many between steps, and run to the end. Checks them against each alone."""
    driver = shape.driver()
    pending = [trace[index] for index in order]
    while pending:
        driver.add(*pending[:arrivals_per_step])
        del pending[:arrivals_per_step]
        driver.step()
    driver.run()
    for request in trace:
        outcome, expected = driver.outcomes[request.request_id], alone(request)
        assert outcome.token_ids == expected.token_ids, f"{request} in {shape}"
        assert outcome.finish_reason is expected.finish_reason
    statistics = driver.scheduler.statistics()
    assert statistics.num_prompt_tokens + statistics.num_cached_prompt_tokens == sum(len(r.prompt_token_ids) for r in trace)
    return driver


SHAPES = [
    Shape(max_num_batched_tokens=8),
    Shape(max_num_batched_tokens=11),
    Shape(max_num_batched_tokens=512),
    Shape(block_size=1, num_spare_blocks=400),
    Shape(block_size=7),
    Shape(block_size=64),
    Shape(max_num_seqs=1),
    Shape(max_num_seqs=3),
    Shape(num_spare_blocks=0),
    Shape(num_spare_blocks=0, block_size=1),
    Shape(num_spare_blocks=3, max_num_batched_tokens=8),
    Shape(num_spare_blocks=5, enable_prefix_caching=False),
    Shape(enable_prefix_caching=False),
    Shape(policy="fcfs"),
    Shape(policy="fcfs", num_spare_blocks=3, max_num_batched_tokens=8),
    Shape(min_chunk_tokens=32),
    Shape(min_chunk_tokens=7, max_num_seqs=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_do_not_depend_on_the_shape(shape: Shape) -> None:
    num_preemptions = num_for_memory = num_hit_tokens = 0
    for seed in range(3):
        trace = random_trace(seed)
        order = list(range(len(trace)))
        random.Random(seed).shuffle(order)
        statistics = run_trace(trace, shape, order, arrivals_per_step=1 + 3 * seed).scheduler.statistics()
        num_preemptions += statistics.num_preemptions
        num_for_memory += statistics.num_preemptions - statistics.num_claim_preemptions
        num_hit_tokens += statistics.num_prefix_hit_tokens
    # The shape must have done what it is for, or the comparison shows nothing.
    assert (num_for_memory > 0) == (shape.num_spare_blocks <= 5), num_for_memory
    if shape.policy == "fcfs":
        assert num_preemptions == num_for_memory
    elif shape.max_num_seqs <= 3 or shape.num_spare_blocks <= 5:
        assert num_preemptions > num_for_memory, "no higher claim took a place"
    assert (num_hit_tokens > 0) == (shape.enable_prefix_caching and shape.block_size <= 16), num_hit_tokens


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.builds(
        Shape,
        block_size=st.integers(1, 9),
        num_spare_blocks=st.sampled_from([0, 1, 3, 8, 100]),
        max_num_seqs=st.integers(1, 8),
        max_num_batched_tokens=st.integers(8, 80),
        enable_prefix_caching=st.booleans(),
        policy=st.sampled_from(["headrace", "fcfs"]),
        min_chunk_tokens=st.sampled_from([1, 5, 32]),
    ),
    order=st.permutations(list(range(8))),
    arrivals_per_step=st.integers(1, 8),
)
def test_outputs_do_not_depend_on_any_shape(seed: int, shape: Shape, order: list[int], arrivals_per_step: int) -> None:
    statistics = run_trace(random_trace(seed, num_requests=8), shape, order, arrivals_per_step).scheduler.statistics()
    event(f"preempted: {statistics.num_preemptions > 0}, hits: {statistics.num_prefix_hit_tokens > 0}")
