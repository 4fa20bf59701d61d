from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.traffic import STANDARD, TrafficPolicy
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.simulation.policies import CURRENT, FCFS, HEADRACE, NO_CHUNKING, POLICIES, RESERVE_MAX, Policy
from headrace.simulation.requests import SimulatedRequest
from headrace.simulation.settings import ServerSettings
from headrace.simulation.step_model import StepModel
from tests.simulation.simulated_record import MS, RefusingTwice, StepLog, machine, request, run


def test_one_request_takes_its_steps_one_after_the_other() -> None:
    model = StepModel(step_ms=10, row_us=1000, token_us=100, kv_ns=1000)
    outcome = run([request(0, due_ms=7, prompt=20, output=3)], machine(model))
    (item,) = outcome.finished
    # 20 prompt tokens: 10 ms + 20 * 0.1 + 20 * 0.001; then one token each: 10 + 1 + 21 * 0.001, 10 + 1 + 22 * 0.001.
    assert item.token_ns == [round(t * MS) for t in (19.02, 30.041, 41.063)]
    assert (item.arrival_ns, item.first_scheduled_ns, item.end_ns) == (7 * MS, 7 * MS, item.token_ns[-1])
    assert (item.reason, outcome.num_steps, outcome.idle_ns) == ("length", 3, 7 * MS)
    assert outcome.busy_ns == item.end_ns - 7 * MS


def test_a_request_that_comes_during_a_step_is_seen_at_its_end() -> None:
    outcome = run([request(0, output=2), request(1, due_ms=3, output=1)], machine())
    late = outcome.finished[1]
    assert (late.arrival_ns, late.first_scheduled_ns, late.token_ns) == (3 * MS, 10 * MS, [20 * MS])


def test_prompts_are_chunked_as_configured_or_not_at_all() -> None:
    at = machine(max_num_seqs=4, max_num_batched_tokens=8)
    long = [request(0, prompt=30, output=1)]
    assert [chunk.num_tokens for chunk in run(long, at).chunks] == [8, 8, 8, 6]
    assert [chunk.num_tokens for chunk in run(long, at, NO_CHUNKING).chunks] == [30]


def test_shared_beginnings_come_from_the_prefix_cache() -> None:
    shared = {"part_tokens": 64, "parts": (7,)}
    requests = [
        request(0, prompt=100, **shared),
        request(1, due_ms=500, prompt=100, **shared),
        request(2, due_ms=900, prompt=100),
    ]
    outcome = run(requests, machine(block_size=32))
    assert [item.num_cached_tokens for item in outcome.finished] == [0, 64, 0]
    assert sum(chunk.num_tokens for chunk in outcome.chunks) == 100 + 36 + 100


def test_fcfs_hides_priorities_from_the_scheduler() -> None:
    requests = [request(0, output=5), request(1, due_ms=1, priority=5), request(2, due_ms=2, priority=0)]
    at = machine(max_num_seqs=1)
    order = [
        [item.request.index for item in sorted(run(requests, at, policy).finished, key=lambda x: x.end_ns)]
        for policy in (CURRENT, FCFS)
    ]
    assert order == [[0, 2, 1], [0, 1, 2]]


def test_reserving_waits_for_all_of_max_tokens_and_never_preempts() -> None:
    at = machine(max_num_seqs=8, num_blocks=8, block_size=4)
    requests = [request(index, prompt=4, output=12, max_tokens=12) for index in range(8)]
    reserving = run(requests, at, RESERVE_MAX)
    assert reserving.statistics.num_preemptions == 0
    assert run(requests, at).statistics.num_preemptions > 0
    # Two fit at once (4 blocks each), so the pairs run one after the other, 12 steps each.
    assert sorted(item.first_scheduled_ns // MS for item in reserving.finished) == [0, 0, 120, 120, 240, 240, 360, 360]


def test_a_full_house_refuses_with_a_time_and_callers_may_come_again() -> None:
    requests = [request(0, output=300), request(1, due_ms=1), request(2, due_ms=2)]
    at = machine(max_num_seqs=1, max_queued_requests=1)
    refused = run(requests, at)
    assert [item.reason for item in refused.finished] == ["length", "length", "refused"]
    assert (refused.num_refusals, refused.finished[2].end_ns, refused.finished[2].token_ns) == (1, 2 * MS, [])
    again = run(requests, at, max_tries=5)
    assert [item.reason for item in again.finished] == ["length"] * 3
    assert again.finished[2].arrival_ns >= 1000 * MS  # Retry-After is whole seconds
    assert again.finished[2].num_tries == again.num_refusals + 1


def test_tries_are_bounded_and_keep_the_time_they_were_told() -> None:
    policy = Policy("refusing", "", admission=RefusingTwice)
    at = machine()
    patient = run([request(0, due_ms=10)], at, policy, max_tries=3)
    assert (patient.finished[0].reason, patient.finished[0].arrival_ns) == ("length", 10_010 * MS)
    hasty = run([request(0, due_ms=10)], at, policy, max_tries=2)
    assert (hasty.finished[0].reason, hasty.finished[0].num_tries, hasty.num_refusals) == ("refused", 2, 2)


@pytest.mark.parametrize("policy", [CURRENT, RESERVE_MAX], ids=lambda policy: policy.name)
def test_a_deadline_ends_a_request_in_the_queue_and_at_the_gate(policy: Policy) -> None:
    requests = [request(0, output=10), request(1, due_ms=1, timeout_ns=20 * MS)]
    outcome = run(requests, machine(max_num_seqs=1), policy)
    late = outcome.finished[1]
    assert (late.reason, late.token_ns, late.first_scheduled_ns) == ("deadline", [], -1)
    # Seen by the scheduler at 30 ms, and told with the events of the step that begins then.
    assert late.end_ns == (40 * MS if policy is CURRENT else 21 * MS)


def test_a_gate_that_lets_nobody_in_is_an_error() -> None:
    class Shut:
        def has_room(self, request: SimulatedRequest) -> bool:
            return False

        def enter(self, request: SimulatedRequest) -> None: ...

        def leave(self, request: SimulatedRequest) -> None: ...

    with pytest.raises(RuntimeError, match="lets nobody in"):
        run([request(0)], machine(), replace(CURRENT, name="shut", gate=lambda _: Shut()))


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 400),  # ms after the one before
        st.integers(1, 60),  # prompt
        st.integers(1, 30),  # output
        st.integers(0, 40),  # more max_tokens
        st.sampled_from([0, 0, 0, 150]),  # timeout, ms
        st.lists(st.integers(0, 3), max_size=3),  # parts
        st.integers(0, 2),  # priority
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None)
@given(
    drawn=REQUESTS,
    policy_name=st.sampled_from(sorted(POLICIES)),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(24, 60),
    max_queued=st.integers(0, 20),
    max_tries=st.integers(1, 3),
)
def test_every_request_ends_once_and_time_is_the_steps_and_the_idle_time(
    drawn: list[tuple[int, int, int, int, int, list[int], int]],
    policy_name: str,
    max_num_seqs: int,
    num_blocks: int,
    max_queued: int,
    max_tries: int,
) -> None:
    due, requests = 0, []
    for index, (gap, prompt, output, more, timeout, parts, priority) in enumerate(drawn):
        due += gap
        requests.append(
            request(
                index,
                due,
                prompt,
                output,
                max_tokens=output + more,
                timeout_ns=timeout * MS,
                part_tokens=8,
                parts=tuple(parts),
                priority=priority,
            )
        )
    log, schedulers = StepLog(), []

    def watched(config: SchedulerConfig, spec: ExecutorSpec) -> Scheduler:
        schedulers.append(Scheduler(config, spec))
        return schedulers[-1]

    policy = replace(POLICIES[policy_name], admission=log.admission, scheduler=watched)
    at = machine(
        StepModel(step_ms=3, row_us=700, token_us=90, kv_ns=2000),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=95,
        max_queued_requests=max_queued,
    )
    outcome = run(requests, at, policy, max_tries)
    schedulers[0].check_integrity()
    assert [item.request for item in outcome.finished] == requests
    assert outcome.end_ns == outcome.busy_ns + outcome.idle_ns
    assert outcome.busy_ns == sum(duration for *_, duration, _ in log.steps)
    assert [duration for *_, duration, _ in log.steps] == [at.step_model.duration_ns(*step[:3]) for step in log.steps]
    for item in outcome.finished:
        assert item.reason in ("length", "refused", "deadline")
        assert len(item.token_ns) == item.request.output_tokens or item.reason != "length"
        assert item.token_ns == sorted(item.token_ns)
        if item.reason == "length":
            assert item.request.due_ns <= item.arrival_ns <= item.first_scheduled_ns < item.token_ns[0]
            assert item.end_ns == item.token_ns[-1] <= outcome.end_ns
        if item.reason == "refused":
            assert (item.token_ns, item.num_tries) == ([], max_tries)
        if item.reason == "deadline":
            assert item.request.timeout_ns
            assert item.end_ns >= item.arrival_ns + item.request.timeout_ns


def test_returns_are_counted_by_what_became_of_them() -> None:
    """Of three callers one is refused once and let in when it comes again."""
    requests = [request(0, output=300), request(1, due_ms=1), request(2, due_ms=2)]
    again = run(requests, machine(max_num_seqs=1, max_queued_requests=1), max_tries=5)
    returns = sum(item.num_tries - 1 for item in again.finished)
    assert returns == again.num_refusals >= 1
    assert sum(item.num_tries > 1 and item.reason != "refused" for item in again.finished) == 1


def test_current_admits_as_configured() -> None:
    """By bounds, only the class's full queue refuses; by forecast, also whose first token would come too late."""
    tight = msgspec.structs.replace(STANDARD, ttft_target_ms=100, max_queued_requests=3)
    policy = TrafficPolicy(classes=(tight,))
    first = [request(index, due_ms=600 * index, output=50) for index in range(4)]
    crowd = [request(4 + index, due_ms=3000 + 20 * index, output=50) for index in range(6)]
    refused = {}
    for admission in ("bounds", "forecast"):
        server = ServerSettings(max_num_seqs=1, admission=admission)
        at = server.machine(StepModel(step_ms=10, row_us=0, token_us=0, kv_ns=0), policy)
        for chosen in (CURRENT, HEADRACE):
            finished = run(first + crowd, at, chosen).finished
            refused[admission, chosen.name] = [item.request.index for item in finished if item.reason == "refused"]
    assert refused["bounds", "current"] == [8, 9]  # one runs, three wait
    assert refused["forecast", "current"] == refused["forecast", "headrace"] == refused["bounds", "headrace"]
    assert len(refused["forecast", "current"]) > 2
