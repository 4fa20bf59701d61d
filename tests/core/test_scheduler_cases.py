"""Named cases of the scheduler: what servers of this kind got wrong, each as a test."""

import pytest

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.lifecycle import FinishReason, RequestState
from headrace.protocol.step import StepFailure, StepPlan, StepResult
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.scheduling.sequence import Sequence
from tests.core.driver import EOS, VOCAB_SIZE, Driver, Outcome, alone, make_request, make_spec, rows_of


def assert_as_alone(driver: Driver, *request_ids: int) -> None:
    for request_id in request_ids or driver.requests:
        expected = alone(driver.requests[request_id])
        outcome = driver.outcomes[request_id]
        assert (outcome.token_ids, outcome.finish_reason) == (expected.token_ids, expected.finish_reason)


def prompt(request_id: int, num_tokens: int) -> list[int]:
    """A prompt that shares no block with another request's."""
    return [2 + request_id % 50, *range(2, 60), *range(2, 60), *range(2, 60)][:num_tokens]


def test_sch_01_what_can_never_fit_ends_at_once_and_blocks_nobody() -> None:
    """SCH-01: pool of 64 blocks of 16, context 2048, prompt of 1,100 tokens, then small ones."""
    driver = Driver(make_spec(num_blocks=64, block_size=16, max_model_len=2048), max_num_batched_tokens=64, max_model_len=2048)
    assert driver.scheduler.limits.max_model_len == 1024
    driver.add(make_request(0, [3] * 1100), make_request(1, [3] * 1024))
    for request_id in (0, 1):
        outcome = driver.outcomes[request_id]
        assert (outcome.finish_reason, outcome.error_code) == (FinishReason.ERROR, "context_length_exceeded")
        assert "1024" in outcome.error_message
    driver.add(make_request(2), make_request(3, [3] * 1023, max_tokens=9))
    driver.run()
    assert_as_alone(driver, 2)
    assert len(driver.outcomes[3].token_ids) == 1  # the largest that fits


def test_sch_02_a_second_round_after_one_that_fits() -> None:
    """SCH-02: pool of 50 blocks; 10 short requests, then 5 that need 63 blocks, then short ones again."""
    driver = Driver(make_spec(num_blocks=50, block_size=16, max_model_len=4096), max_model_len=4096)
    driver.add(*(make_request(i, prompt(i, 20)) for i in range(10)))
    driver.run()
    driver.add(*(make_request(10 + i, [3] * 1000) for i in range(5)))
    assert all(driver.outcomes[10 + i].error_code == "context_length_exceeded" for i in range(5))
    driver.add(*(make_request(20 + i, prompt(i, 20)) for i in range(5)))
    driver.run()
    assert_as_alone(driver, *range(10), *range(20, 25))


def test_sch_02_one_request_may_use_the_whole_pool() -> None:
    """No block is set aside: prompt and output fill every slot but the last token's, which is never computed."""
    driver = Driver(make_spec(num_blocks=5, block_size=4), max_model_len=100)
    driver.add(make_request(0, prompt(0, 12), max_tokens=50))
    outcome = driver.run()[0]
    assert (len(outcome.token_ids), outcome.finish_reason) == (8, FinishReason.LENGTH)
    assert driver.scheduler.statistics().num_preemptions == 0


def test_sch_04_pool_for_three_long_replies_and_twelve_requests() -> None:
    """SCH-04: all finish, the preempted ones resume with equal text, and every step advances somebody."""
    driver = Driver(
        make_spec(num_blocks=30, block_size=4), max_num_seqs=12, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    driver.add(*(make_request(i, prompt(i, 10), max_tokens=30) for i in range(12)))
    driver.run()
    assert driver.scheduler.statistics().num_preemptions > 0
    assert_as_alone(driver)


def test_sch_05_pool_for_little_more_than_one_request() -> None:
    """SCH-05, INV-9: preemptions are bounded, the oldest is never preempted, and it advances in every step."""
    driver = Driver(make_spec(num_blocks=12, block_size=4, max_model_len=40), max_num_seqs=8, enable_prefix_caching=False)
    driver.add(*(make_request(i, prompt(i, 10), max_tokens=30) for i in range(6)))
    while driver.scheduler.has_work:
        oldest = min(request_id for request_id, outcome in driver.outcomes.items() if outcome.finish_reason is None)
        plan = driver.step()
        assert oldest in {row.request_id for row in plan.rows}
    driver.check_idle()
    assert_as_alone(driver)
    statistics = driver.scheduler.statistics()
    assert 0 < statistics.num_preemptions <= 6 * 3
    assert driver.outcomes[0].usage is not None
    assert driver.outcomes[0].usage.num_preemptions == 0


def test_sch_07_preempted_before_newcomers_of_equal_priority() -> None:
    """SCH-07, INV-16: while newcomers keep coming, whoever was preempted runs again before any of them is admitted."""
    driver = Driver(make_spec(num_blocks=10, block_size=4, max_model_len=40), max_num_seqs=4, enable_prefix_caching=False)
    driver.add(*(make_request(i, prompt(i, 12), max_tokens=24) for i in range(2)))
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    admitted: list[int] = []
    for newcomer in range(10, 20):
        # Said to have arrived before all others, as over a slower way: that does not put it before the preempted one.
        driver.add(make_request(newcomer, prompt(newcomer, 8), max_tokens=2, arrival_ns=0, priority=newcomer % 2))
        admitted += [request_id for request_id, _ in rows_of(driver.step()) if request_id not in admitted]
    driver.run()
    admitted += [request_id for plan in driver.plans for request_id, _ in rows_of(plan) if request_id not in admitted]
    assert admitted.index(1) < min(admitted.index(newcomer) for newcomer in range(10, 20))
    assert_as_alone(driver)


def test_sch_07_better_priority_may_overtake_a_preempted_one() -> None:
    driver = Driver(make_spec(num_blocks=10, block_size=4, max_model_len=40), max_num_seqs=4, enable_prefix_caching=False)
    driver.add(*(make_request(i, prompt(i, 12), max_tokens=24) for i in range(2)))
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    num_steps = len(driver.plans)
    driver.add(make_request(2, prompt(2, 2), max_tokens=2, priority=-1))
    driver.run()
    order = [request_id for plan in driver.plans[num_steps:] for request_id, _ in rows_of(plan)]
    assert order.index(2) < order.index(1)
    assert_as_alone(driver)


def test_sch_07_low_priority_ages_and_finishes_under_steady_load() -> None:
    """SCH-07: one place, and a better request in every step: the low one starts once it has waited its levels out."""
    aging_ns = 20_000_000  # 20 steps for a level
    driver = Driver(max_num_seqs=1, priority_aging_ns=aging_ns)
    start_ns = driver.clock.now_ns()
    driver.add(make_request(0, priority=2, arrival_ns=start_ns))
    for request_id in range(1, 200):
        driver.add(make_request(request_id, max_tokens=1, priority=0, arrival_ns=driver.clock.now_ns()))
        driver.step()
    low = driver.outcomes[0]
    assert low.finish_reason is FinishReason.LENGTH
    waited_ns = low.first_scheduled_ns - start_ns
    assert 2 * aging_ns - 2_000_000 <= waited_ns <= 2 * aging_ns + 4_000_000
    driver.run()


def test_priority_then_arrival_orders_the_queue() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request(0), make_request(1, priority=5), make_request(2, priority=0), make_request(3, priority=-1))
    driver.run()
    finished = sorted(driver.outcomes, key=lambda request_id: driver.outcomes[request_id].event_steps[-1])
    assert finished == [3, 0, 2, 1]


def test_the_worst_in_rank_is_preempted() -> None:
    """Lowest priority first, whatever the arrival."""
    driver = Driver(make_spec(num_blocks=15, block_size=4, max_model_len=40), max_num_seqs=4, enable_prefix_caching=False)
    driver.add(make_request(0, prompt(0, 12), max_tokens=24, priority=1))
    driver.add(*(make_request(i, prompt(i, 12), max_tokens=24) for i in (1, 2)))
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    assert {row.request_id for row in driver.plans[-1].rows} == {1, 2}
    driver.run()
    assert_as_alone(driver)


def test_dis_02_a_cancelled_queued_request_is_dropped_without_prefill() -> None:
    """DIS-02: one place busy, three queued and cancelled: the executor never hears of them."""
    driver = Driver(max_num_seqs=1)
    driver.add(*(make_request(i, max_tokens=6) for i in range(5)))
    driver.step()
    for request_id in (1, 2, 3):
        driver.cancel(request_id)
        assert driver.outcomes[request_id].finish_reason is FinishReason.CANCELLED
        assert driver.outcomes[request_id].usage is not None
    assert driver.scheduler.statistics().num_waiting == 1
    driver.run()
    assert {row.request_id for plan in driver.plans for row in plan.rows} == {0, 4}
    assert_as_alone(driver, 0, 4)


@pytest.mark.parametrize("num_steps", range(21))
def test_dis_05_cancelling_one_leaves_the_others_unchanged(num_steps: int) -> None:
    """DIS-05: eight streams with a common prefix, one cancelled after each number of steps; memory is checked throughout."""
    driver = Driver(make_spec(num_blocks=40, block_size=4), max_num_seqs=8, max_num_batched_tokens=24)
    common = list(range(2, 15))
    driver.add(*(make_request(i, [*common, 20 + i], max_tokens=16) for i in range(8)))
    for _ in range(num_steps):
        driver.step()
    driver.cancel(3)
    driver.run()
    assert_as_alone(driver, 0, 1, 2, 4, 5, 6, 7)
    cancelled = driver.outcomes[3]
    assert cancelled.finish_reason is (FinishReason.CANCELLED if len(cancelled.token_ids) < 16 else FinishReason.LENGTH)
    assert cancelled.token_ids == alone(driver.requests[3]).token_ids[: len(cancelled.token_ids)]


def test_lim_04_a_sequence_that_fills_its_context_ends_with_length() -> None:
    """LIM-04: no end token, no count in the way, small context, four at once."""
    driver = Driver(make_spec(num_blocks=64, block_size=4, max_model_len=32), max_num_seqs=4)
    driver.add(*(make_request(i, prompt(i, 5 + i), max_tokens=10_000) for i in range(4)))
    driver.run()
    for request_id, outcome in driver.outcomes.items():
        assert outcome.finish_reason is FinishReason.LENGTH
        assert 5 + request_id + len(outcome.token_ids) == 32


def test_met_05_preemption_is_counted_once_and_leaves_the_first_token_time_alone() -> None:
    """MET-05: counters of a forced preemption; queue time and first token stay those of the first scheduling."""
    driver = Driver(make_spec(num_blocks=9, block_size=4, max_model_len=32), max_num_seqs=2, enable_prefix_caching=False)
    driver.add(make_request(0, prompt(0, 11), max_tokens=12), make_request(1, prompt(1, 11), max_tokens=12))
    driver.step()
    driver.step()
    first_scheduled_ns = driver.outcomes[1].first_scheduled_ns
    driver.run()
    statistics = driver.scheduler.statistics()
    assert statistics.num_preemptions == 1
    outcome = driver.outcomes[1]
    assert outcome.usage is not None
    assert outcome.usage.num_preemptions == 1
    assert outcome.first_scheduled_ns == first_scheduled_ns > 0
    gaps = [after - before for before, after in zip(outcome.event_steps, outcome.event_steps[1:], strict=False)]
    assert max(gaps) > 1
    assert statistics.num_prompt_tokens == 22
    assert statistics.num_recomputed_tokens > 11
    assert statistics.num_generated_tokens == 24
    assert_as_alone(driver)


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    """Otherwise the newcomer would be preempted as soon as the running one crosses into its next block."""
    driver = Driver(make_spec(num_blocks=4, block_size=4), max_num_seqs=2, enable_prefix_caching=False)
    driver.add(*(make_request(i, prompt(i, 8), max_tokens=4) for i in range(2)))
    driver.run()
    assert driver.scheduler.statistics().num_preemptions == 0
    assert_as_alone(driver)


def test_coming_back_from_preemption_is_no_prefix_query() -> None:
    """It may find its own blocks, but the hit rate tells of prompts that arrive."""
    driver = Driver(make_spec(num_blocks=10, block_size=4, max_model_len=32), max_num_seqs=2)
    driver.add(make_request(0, prompt(0, 11), max_tokens=12), make_request(1, prompt(1, 11), max_tokens=12))
    driver.run()
    statistics = driver.scheduler.statistics()
    assert statistics.num_preemptions > 0
    assert (statistics.num_prefix_query_tokens, statistics.num_prefix_hit_tokens) == (22, 0)
    assert_as_alone(driver)


def test_a_prompt_never_makes_a_stream_wait() -> None:
    """INV-15: rows that draw from a single token come first, in every step, however long the prompts beside them."""
    driver = Driver(make_spec(num_blocks=400, block_size=1), max_num_seqs=4, max_num_batched_tokens=8)
    driver.add(make_request(0, max_tokens=40), make_request(1, prompt(1, 100)), make_request(2, prompt(2, 100)))
    driver.run()
    steps = driver.outcomes[0].event_steps
    assert steps == list(range(steps[0], steps[0] + 40))
    assert max(plan.num_tokens for plan in driver.plans) == 8


@pytest.mark.parametrize(
    ("min_chunk_tokens", "rows"),
    [
        (2, [[(0, 4), (1, 4)], [(0, 4), (1, 5)], [(1, 1), (0, 5)], [(0, 1)], [(0, 1)]]),
        (6, [[(0, 8)], [(0, 5)], [(0, 1), (1, 9)], [(0, 1), (1, 1)]]),
    ],
)
def test_prompts_share_the_budget_and_join_while_it_has_a_chunk_for_each(
    min_chunk_tokens: int, rows: list[list[tuple[int, int]]]
) -> None:
    """In whole blocks of 4, where a share does not end its prompt."""
    driver = Driver(make_spec(num_blocks=200), max_num_seqs=3, max_num_batched_tokens=10, min_chunk_tokens=min_chunk_tokens)
    driver.add(make_request(0, prompt(0, 13), max_tokens=3), make_request(1, prompt(1, 9), max_tokens=2))
    driver.run()
    assert [rows_of(plan) for plan in driver.plans] == rows


def test_cached_tokens_are_counted_once() -> None:
    driver = Driver()
    driver.add(make_request(0, prompt(0, 12)))
    driver.run()
    driver.add(make_request(1, prompt(0, 12)))
    driver.run()
    usage = driver.outcomes[1].usage
    assert usage is not None
    assert usage.num_cached_tokens == 8
    statistics = driver.scheduler.statistics()
    assert (statistics.num_prefix_query_tokens, statistics.num_prefix_hit_tokens) == (24, 8)
    assert (statistics.num_prompt_tokens, statistics.num_cached_prompt_tokens) == (16, 8)


def test_ten_05_a_salt_keeps_caches_apart() -> None:
    """TEN-01, TEN-05: another salt finds nothing; the same one does, or the test would show nothing."""
    driver = Driver()
    for request_id, salt in enumerate(["a", "b", "a"]):
        driver.add(make_request(request_id, prompt(0, 12), cache_salt=salt))
        driver.run()
    cached = [outcome.usage.num_cached_tokens for outcome in driver.outcomes.values() if outcome.usage]
    assert cached == [0, 0, 8]


def end_of(outcome: Outcome) -> tuple[int, FinishReason | None]:
    return len(outcome.token_ids), outcome.finish_reason


def test_stop_tokens_end_a_sequence_and_are_its_last_token() -> None:
    free = alone(make_request(0, max_tokens=30))
    stop = free.token_ids[6]
    first_at = free.token_ids.index(stop)
    outcome = alone(make_request(0, max_tokens=30, stop_token_ids=(stop,)))
    assert end_of(outcome) == (first_at + 1, FinishReason.STOP)
    assert outcome.token_ids[-1] == stop
    assert outcome.usage is not None
    assert outcome.usage.num_output_tokens == first_at + 1


def prompt_that_ends(max_tokens: int) -> list[int]:
    """A prompt after which the fake model draws the end token early."""
    for last in range(2, VOCAB_SIZE):
        if EOS in alone(make_request(0, [7, last], max_tokens=max_tokens)).token_ids[1:]:
            return [7, last]
    raise AssertionError("no such prompt")


def test_eos_min_tokens_and_ignore_eos() -> None:
    tokens = prompt_that_ends(20)
    ignoring = alone(make_request(0, tokens, max_tokens=20))
    at = ignoring.token_ids.index(EOS)
    assert end_of(ignoring) == (20, FinishReason.LENGTH)
    assert end_of(alone(make_request(0, tokens, max_tokens=20, ignore_eos=False))) == (at + 1, FinishReason.STOP)
    assert end_of(alone(make_request(0, tokens, max_tokens=20, min_tokens=at, ignore_eos=False))) == (at + 1, FinishReason.STOP)
    held_off = alone(make_request(0, tokens, max_tokens=20, min_tokens=at + 1, ignore_eos=False))
    assert held_off.token_ids[:at] == ignoring.token_ids[:at]
    assert held_off.token_ids[at] != EOS
    all_held_off = alone(make_request(0, tokens, max_tokens=20, min_tokens=20, ignore_eos=False))
    assert EOS not in all_held_off.token_ids
    assert len(all_held_off.token_ids) == 20


def test_deadlines_end_waiting_and_running_requests() -> None:
    driver = Driver(max_num_seqs=1)
    now_ns = driver.clock.now_ns()
    driver.add(make_request(0, max_tokens=50, deadline_ns=now_ns + 5_000_000))
    driver.step()
    driver.add(make_request(1, deadline_ns=now_ns + 3_000_000), make_request(2, deadline_ns=now_ns + 500_000_000))
    driver.run()
    assert end_of(driver.outcomes[1]) == (0, FinishReason.DEADLINE)
    assert driver.outcomes[1].event_steps == [2]
    assert "deadline" in driver.outcomes[1].error_message
    assert end_of(driver.outcomes[0]) == (4, FinishReason.DEADLINE)
    assert end_of(driver.outcomes[2]) == (4, FinishReason.LENGTH)
    assert 1 not in {row.request_id for plan in driver.plans for row in plan.rows}


def test_released_ids_name_what_the_executor_holds_and_ride_on_the_next_plan() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(make_request(0, max_tokens=1), make_request(1, max_tokens=3), make_request(2))
    driver.step()
    driver.cancel(2)  # never planned: the executor has nothing to forget
    assert driver.step().released_ids == [0]
    driver.run()
    assert driver.executor.live_request_ids == {1}
    empty = driver.step()
    assert (empty.rows, empty.released_ids) == ([], [])
    driver.add(make_request(3))
    assert driver.step().released_ids == [1]
    assert driver.executor.live_request_ids == {3}


def test_a_duplicate_id_is_dropped_and_counted() -> None:
    driver = Driver()
    driver.add(make_request(0, max_tokens=5))
    driver.step()
    driver.scheduler.add(make_request(0, [9, 9]), driver.clock.now_ns())
    driver.run()
    assert_as_alone(driver)
    assert driver.scheduler.statistics().num_duplicates == 1
    assert driver.scheduler.statistics().num_started == 1


@pytest.mark.parametrize("bad_prompt", [[], [VOCAB_SIZE], [-1]])
def test_a_prompt_that_is_not_one_ends_with_an_error(bad_prompt: list[int]) -> None:
    driver = Driver()
    driver.add(make_request(0, bad_prompt), make_request(1))
    driver.run()
    assert (driver.outcomes[0].finish_reason, driver.outcomes[0].error_code) == (FinishReason.ERROR, "invalid_value")
    assert_as_alone(driver, 1)


def test_a_failed_row_ends_its_request_alone() -> None:
    """INV-17."""
    driver = Driver()
    driver.executor.failing[1] = StepFailure("execution_failed", "not a number")
    driver.add(*(make_request(i, prompt(i, 9)) for i in range(3)))
    driver.run()
    assert driver.outcomes[1].error_message == "not a number"
    assert_as_alone(driver, 0, 2)


@pytest.mark.parametrize("drawn", [None, -1, VOCAB_SIZE])
def test_an_executor_that_draws_nothing_or_nonsense_ends_the_request(drawn: int | None) -> None:
    driver = Driver()
    driver.add(make_request(0), make_request(1))
    plan = driver.schedule()
    result = driver.executor.execute(plan)
    tokens = {1: result.tokens[1]} if drawn is None else {0: drawn, 1: result.tokens[1]}
    driver.apply(plan, StepResult(plan.step_id, tokens))
    assert driver.outcomes[0].error_code == "internal_error"
    driver.run()
    assert_as_alone(driver, 1)


def test_steps_out_of_turn_are_defects_of_the_caller() -> None:
    driver = Driver()
    driver.add(make_request(0, max_tokens=9))
    plan = driver.schedule()
    with pytest.raises(RuntimeError, match="applied"):
        driver.scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="result of step"):
        driver.scheduler.apply(plan, StepResult(plan.step_id + 1, {}), 0)
    with pytest.raises(RuntimeError, match="not in flight"):
        driver.scheduler.apply(StepPlan(plan.step_id, plan.rows, plan.num_tokens), StepResult(plan.step_id, {}), 0)
    driver.apply(plan, driver.executor.execute(plan))
    with pytest.raises(RuntimeError, match="not in flight"):
        driver.scheduler.fail_step(plan, "", "", 0)


def test_what_a_failed_step_was_told_to_forget_is_told_again() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(make_request(0, max_tokens=1), make_request(1), make_request(2))
    driver.step()
    plan = driver.schedule()
    assert plan.released_ids == [0]
    driver.scheduler.fail_step(plan, "execution_failed", "device lost", driver.clock.now_ns())
    assert driver.schedule().released_ids == [0, 1]


def test_an_empty_step_may_be_executed_and_applied() -> None:
    driver = Driver()
    plan = driver.schedule()
    driver.apply(plan, StepResult(plan.step_id, {}))
    driver.add(make_request(0))
    driver.run()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((0, 16, 64), "max_num_seqs"),
        ((8, 7, 64), "max_num_batched_tokens"),
        ((1, 0, 64), "max_num_batched_tokens"),
        ((1, 1, 1), "max_model_len"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(values: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        SchedulerConfig(*values)


def test_a_pool_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="KV pool"):
        Scheduler(SchedulerConfig(1, 1, 64), make_spec(num_blocks=1, block_size=1))


def test_a_transition_that_the_table_lacks_is_a_defect() -> None:
    sequence = Sequence(make_request(0), frozenset(), 64, 0)
    sequence.move_to(RequestState.FINISHED)
    with pytest.raises(RuntimeError, match="no transition"):
        sequence.move_to(RequestState.RUNNING)
