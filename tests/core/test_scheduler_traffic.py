"""Classes, tenants, time limits and time-budgeted steps in the Scheduler as a whole: named cases."""

import pytest

from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.stalls import StallCause
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, ServiceClass, Tenant, TrafficPolicy
from tests.core.driver import Driver, alone, make_request, make_spec, rows_of

MS = 1_000_000


def traffic(*, tbt_target_ms: float = 0, queue_timeout_ms: float = 0, low_target_ms: float = 1000) -> TrafficPolicy:
    """Two levels; the higher has a TBT target, the lower a limit of its time in the queue."""
    classes = (
        ServiceClass(name="interactive", level=0, ttft_target_ms=100, tbt_target_ms=tbt_target_ms),
        ServiceClass(name="batch", level=1, ttft_target_ms=low_target_ms, tbt_target_ms=0, queue_timeout_ms=queue_timeout_ms),
    )
    tenants = tuple(Tenant(name=name) for name in (DEFAULT_TENANT, OTHER_TENANT, "heavy", "light"))
    return TrafficPolicy(classes=classes, default_class="batch", tenants=tenants)


def request(driver: Driver, number: int, num_tokens: int = 3, **fields) -> GenerationRequest:  # type: ignore[no-untyped-def]
    """It arrives now; it shares no block with another."""
    prompt = [2 + number % 50, *[3 + index % 50 for index in range(num_tokens - 1)]]
    return make_request(number, prompt, arrival_ns=driver.clock.now_ns(), **fields)


def assert_as_alone(driver: Driver) -> None:
    for number, asked in driver.requests.items():
        assert driver.outcomes[number].token_ids == alone(asked).token_ids


@pytest.mark.parametrize("caching", [True, False])
def test_sch_08_streams_that_give_way_go_on_without_loss(caching: bool) -> None:
    """SCH-08: two choices of one prompt stream in all places; a higher claim takes one place, and both end as if alone."""
    driver = Driver(max_num_seqs=2, traffic=traffic(), enable_prefix_caching=caching)
    both = [make_request(n, range(2, 14), max_tokens=30, temperature=0.8, seed=n, service_class="batch") for n in (0, 1)]
    driver.add(*both)
    for _ in range(10):
        driver.step()
    num_tokens = [len(driver.outcomes[number].token_ids) for number in (0, 1)]
    assert min(num_tokens) > 3
    driver.add(request(driver, 2, service_class="interactive"))
    plan = driver.step()
    assert {row.request_id for row in plan.rows} == {0, 2}  # the last in rank gave way, at once
    driver.run()
    statistics = driver.scheduler.statistics()
    assert (statistics.num_claim_preemptions, statistics.num_preemptions) == (1, 1)
    usages = [driver.outcomes[number].usage for number in (0, 1, 2)]
    assert [usage.num_preemptions for usage in usages if usage is not None] == [0, 1, 0]
    assert_as_alone(driver)


def test_a_higher_claim_takes_the_memory_of_as_many_lower_ones_as_it_needs() -> None:
    driver = Driver(make_spec(num_blocks=20, block_size=4), max_num_seqs=8, traffic=traffic(), enable_prefix_caching=False)
    driver.add(*(request(driver, number, 12, max_tokens=12, service_class="batch") for number in range(4)))
    driver.step()
    driver.step()
    driver.add(request(driver, 9, 30, service_class="interactive"))  # 8 blocks, and one for each that goes on running
    for _ in range(2):
        driver.step()
    assert 9 in {row.request_id for row in driver.plans[-1].rows}
    assert driver.scheduler.statistics().num_claim_preemptions == 2
    driver.run()
    assert_as_alone(driver)


def test_nobody_gives_way_in_vain() -> None:
    """All lower claims together hold too little: the higher one waits, and they go on."""
    driver = Driver(make_spec(num_blocks=20, block_size=4), max_num_seqs=8, traffic=traffic(), enable_prefix_caching=False)
    driver.add(request(driver, 0, 40, max_tokens=20, service_class="interactive"))
    driver.add(request(driver, 1, 12, max_tokens=8, service_class="batch"))
    while driver.scheduler.statistics().num_waiting:
        driver.step()
    driver.add(request(driver, 2, 48, service_class="interactive"))
    for _ in range(5):
        driver.step()
    statistics = driver.scheduler.statistics()
    assert (statistics.num_claim_preemptions, statistics.blocked_by) == (0, StallCause.NO_BLOCKS)
    driver.run()
    assert_as_alone(driver)


def gaps_ms(driver: Driver, stream: int, num_prompts: int, num_steps: int) -> list[float]:
    """Between tokens of a stream beside prompts of 200 tokens, one after the other; a token of a step takes a millisecond."""
    gaps = []
    before_ns = 0
    next_prompt = 100
    for _ in range(num_steps):
        if len(driver.requests) < num_prompts + 1 and not driver.scheduler.statistics().num_waiting:
            driver.add(request(driver, next_prompt, 200, max_tokens=1, service_class="batch"))
            next_prompt += 1
        num_tokens = len(driver.outcomes[stream].token_ids)
        plan = driver.schedule()
        driver.step_ns = (2 + plan.num_tokens) * MS
        driver.apply(plan, driver.executor.execute(plan))
        if len(driver.outcomes[stream].token_ids) > num_tokens:
            gaps.append((driver.clock.now_ns() - before_ns) / MS)
            before_ns = driver.clock.now_ns()
    return gaps[1:]


def test_sch_10_steps_keep_the_gap_of_streams_and_chunks_do_not_change_what_comes_out() -> None:
    """SCH-10: the budget of tokens sets the gap where steps are not bounded in time; bounded, they keep the target."""
    worst: dict[tuple[bool, int], float] = {}
    for is_bounded in (True, False):
        for max_tokens in (32, 64, 256):
            driver = Driver(
                make_spec(num_blocks=400),
                max_num_batched_tokens=max_tokens,
                traffic=traffic(tbt_target_ms=50),
                step_time_budget=is_bounded,
            )
            driver.add(request(driver, 1, max_tokens=200, service_class="interactive"))
            gaps = gaps_ms(driver, 1, num_prompts=60, num_steps=150)
            assert driver.scheduler.statistics().num_prompt_tokens > 3 * 200
            worst[is_bounded, max_tokens] = max(gaps[30:])
            driver.run()
            assert_as_alone(driver)
    assert worst[False, 256] > 200
    assert worst[False, 32] < worst[False, 64] < worst[False, 256]
    assert max(worst[True, max_tokens] for max_tokens in (32, 64, 256)) <= 50 * 1.1
    assert worst[True, 256] > 40  # and use it


def test_a_step_without_a_stream_is_not_bounded_in_time() -> None:
    driver = Driver(make_spec(num_blocks=400), max_num_batched_tokens=256, traffic=traffic(tbt_target_ms=1))
    driver.add(request(driver, 1, 200, service_class="interactive"))
    assert rows_of(driver.step()) == [(1, 200)]
    driver.add(request(driver, 2, 200, service_class="interactive"))
    assert sum(num_tokens for _, num_tokens in rows_of(driver.step())) < 10
    statistics = driver.scheduler.statistics()
    assert statistics.step_time_target_ns == 1 * MS
    assert statistics.step_time_predicted_ns > 1 * MS
    assert 0 < statistics.step_time_error_ratio < 10


def test_sch_11_a_light_tenant_starts_within_a_bounded_number_of_completions() -> None:
    """SCH-11: 200 requests of one tenant, then one of another: it starts with one of the next places that become free."""
    driver = Driver(make_spec(num_blocks=200), max_num_seqs=2, traffic=traffic())
    driver.add(*(request(driver, n, 8, max_tokens=4, service_class="interactive", tenant_id="heavy") for n in range(200)))
    for _ in range(10):
        driver.step()
    driver.add(request(driver, 900, 8, service_class="interactive", tenant_id="light"))

    def num_ended() -> int:
        return sum(driver.scheduler.statistics().num_finished.values())

    before = num_ended()
    while 900 not in {row.request_id for row in driver.step().rows}:
        pass
    assert num_ended() - before <= 2
    driver.run()


def test_tenants_share_tokens_not_requests() -> None:
    """Both have more than is served; one sends prompts four times as long and so gets a quarter as many through."""
    driver = Driver(
        make_spec(num_blocks=400), max_num_seqs=2, max_num_batched_tokens=64, traffic=traffic(), enable_prefix_caching=False
    )
    for number in range(120):
        is_heavy = number % 2 == 0
        tenant = "heavy" if is_heavy else "light"
        driver.add(request(driver, number, 80 if is_heavy else 20, max_tokens=1, tenant_id=tenant, service_class="batch"))
    while sum(driver.scheduler.statistics().num_finished.values()) < 50:
        driver.step()
    done = [number for number, outcome in driver.outcomes.items() if outcome.finish_reason is not None]
    num_heavy = sum(number % 2 == 0 for number in done)
    assert 8 <= num_heavy <= 12
    driver.run()


@pytest.mark.parametrize("low_target_ms", [10, 60])
def test_sch_07_a_low_class_ages_and_finishes_under_steady_load(low_target_ms: int) -> None:
    """SCH-07: an interactive request in every step for one place; the batch one starts when it has waited its level out.

    That takes the ageing time, or until its first token is due where that is later.
    """
    aging_ns = max(40, low_target_ms) * MS
    driver = Driver(max_num_seqs=1, traffic=traffic(low_target_ms=low_target_ms), class_aging_ns=40 * MS)
    start_ns = driver.clock.now_ns()
    driver.add(request(driver, 0, service_class="batch", max_tokens=6, tenant_id="light"))
    for number in range(1, 120):
        driver.add(request(driver, number, max_tokens=1, service_class="interactive", tenant_id="heavy"))
        driver.step()
    low = driver.outcomes[0]
    assert low.finish_reason is FinishReason.LENGTH
    assert aging_ns <= low.first_scheduled_ns - start_ns <= aging_ns + 4 * MS
    assert low.usage is not None
    assert low.usage.num_preemptions == 0  # what came in by age is not thrown out by the next newcomer
    driver.run()


def test_sch_16_the_time_in_the_queue_is_for_those_that_have_never_run() -> None:
    """SCH-16: the one that waits leaves on time; the one that was preempted may wait for longer, and ends well."""
    driver = Driver(max_num_seqs=1, traffic=traffic(queue_timeout_ms=10))
    driver.add(request(driver, 0, max_tokens=6, service_class="batch"))
    driver.step()
    driver.step()
    driver.add(request(driver, 1, max_tokens=30, service_class="interactive"), request(driver, 2, service_class="batch"))
    added_ns = driver.clock.now_ns()
    while driver.outcomes[2].finish_reason is None:
        driver.step()
    assert 10 * MS <= driver.clock.now_ns() - added_ns <= 11 * MS
    outcome = driver.outcomes[2]
    assert (outcome.finish_reason, outcome.token_ids) == (FinishReason.DEADLINE, [])
    assert outcome.error_code == ErrorCode.DEADLINE_EXCEEDED.value.code
    assert "'batch'" in outcome.error_message
    driver.run()
    assert driver.outcomes[0].finish_reason is FinishReason.LENGTH
    assert driver.outcomes[0].usage is not None
    assert driver.outcomes[0].usage.num_preemptions == 1
    assert 2 not in {row.request_id for plan in driver.plans for row in plan.rows}


def test_fcfs_is_by_arrival_alone_and_keeps_time_limits() -> None:
    driver = Driver(max_num_seqs=1, traffic=traffic(queue_timeout_ms=30), policy="fcfs", class_aging_ns=MS)
    classes = ["batch", "interactive", "batch", "interactive", "interactive"]
    for number, name in enumerate(classes):
        driver.add(request(driver, number, max_tokens=2, service_class=name, priority=-number, tenant_id="heavy"))
    driver.add(request(driver, 8, max_tokens=40, service_class="interactive"), request(driver, 9, service_class="batch"))
    driver.run()
    order = sorted(driver.outcomes, key=lambda number: driver.outcomes[number].event_steps[0])
    assert [number for number in order if number != 9] == [0, 1, 2, 3, 4, 8]
    assert driver.outcomes[9].finish_reason is FinishReason.DEADLINE
    assert driver.scheduler.statistics().num_preemptions == 0


def test_of_requests_whose_turn_it_is_the_one_with_a_cached_prefix_goes_first() -> None:
    driver = Driver(max_num_seqs=1, traffic=traffic())
    shared = list(range(2, 22))
    driver.add(make_request(0, shared, max_tokens=1, arrival_ns=driver.clock.now_ns()))
    driver.run()
    driver.add(request(driver, 1, 20), request(driver, 2, 20))
    driver.add(make_request(3, [*shared, 50], arrival_ns=driver.clock.now_ns()))
    driver.step()
    assert {row.request_id for row in driver.plans[-1].rows} == {3}
    driver.run()
    assert_as_alone(driver)


def test_a_blocked_head_is_not_matched_anew_in_every_step() -> None:
    """Its prefix is in the cache and held by nobody: finding that out once is enough while nothing of it changes."""
    driver = Driver(make_spec(num_blocks=50, block_size=4), max_num_seqs=4, traffic=traffic())
    shared = list(range(2, 50))
    driver.add(make_request(0, shared, max_tokens=1))
    driver.run()
    driver.add(request(driver, 1, 60, max_tokens=40, service_class="interactive"))
    driver.step()
    driver.add(make_request(2, [*shared, *shared, *shared], arrival_ns=driver.clock.now_ns(), service_class="interactive"))
    blocks = driver.scheduler._blocks
    inner, counted = blocks._num_idle, []
    blocks._num_idle = lambda nodes: counted.append(len(nodes)) or inner(nodes)  # type: ignore[method-assign, func-returns-value]
    for _ in range(20):
        driver.step()
    assert driver.scheduler.statistics().blocked_by is StallCause.NO_BLOCKS
    assert len(counted) <= 1
    driver.run()
    assert_as_alone(driver)


def test_a_prompt_under_way_can_lose_its_memory_to_a_stream() -> None:
    """It is the last in rank, and has no row in the step in which that happens."""
    driver = Driver(
        make_spec(num_blocks=20, block_size=4), max_num_seqs=2, max_num_batched_tokens=3, enable_prefix_caching=False
    )
    driver.add(request(driver, 0, 4, max_tokens=40))
    driver.step()
    driver.add(request(driver, 1, 60))
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    assert rows_of(driver.plans[-1]) == [(0, 1)]
    assert driver.outcomes[1].token_ids == []
    driver.run()
    assert_as_alone(driver)


def test_a_running_prompt_that_gets_nothing_ages_as_one_that_waits() -> None:
    """Interactive prompts take the whole budget of every step, one after the other; the batch one gets on by age."""
    driver = Driver(
        make_spec(num_blocks=400),
        max_num_batched_tokens=8,
        min_chunk_tokens=8,
        traffic=traffic(low_target_ms=10),
        class_aging_ns=40 * MS,
    )
    driver.add(request(driver, 0, 100, max_tokens=1, service_class="batch"))
    driver.step()
    for number in range(1, 20):
        driver.add(request(driver, number, 100, max_tokens=1, service_class="interactive"))
    while driver.outcomes[0].finish_reason is None:
        driver.step()
    assert 40 <= driver.outcomes[0].event_steps[-1] <= 80
    assert driver.scheduler.statistics().num_waiting > 10
    driver.run()


def test_output_tokens_count_for_the_share() -> None:
    """Equal prompts: the tenant whose answers are long gets fewer of them through (8 + 2 * 30 against 8 + 2 * 5)."""
    driver = Driver(max_num_seqs=1, traffic=traffic(), enable_prefix_caching=False)
    for number in range(120):
        tenant, max_tokens = ("heavy", 30) if number % 2 == 0 else ("light", 5)
        driver.add(request(driver, number, 8, max_tokens=max_tokens, tenant_id=tenant, service_class="batch"))
    while sum(driver.scheduler.statistics().num_finished.values()) < 48:
        driver.step()
    done = [number for number, outcome in driver.outcomes.items() if outcome.finish_reason is not None]
    assert 9 <= sum(number % 2 == 0 for number in done) <= 11
    driver.run()


def test_the_tightest_target_of_the_streams_bounds_the_step() -> None:
    classes = tuple(
        ServiceClass(name=f"c{target_ms}", level=0, ttft_target_ms=100, tbt_target_ms=target_ms)
        for target_ms in (30, 20, 0, 25)
    )
    driver = Driver(traffic=TrafficPolicy(classes=classes, default_class="c0"))
    targets = []
    for number, service_class in enumerate(["c0", "c30", "c20", "c25"]):
        driver.add(request(driver, number, max_tokens=30, service_class=service_class))
        driver.step()
        driver.step()
        targets.append(driver.scheduler.statistics().step_time_target_ns / MS)
    assert targets == [0, 30, 20, 20]
    driver.run()


def test_blocks_of_an_answer_are_found_by_the_next_turn() -> None:
    driver = Driver(traffic=traffic())
    driver.add(request(driver, 0, 6, max_tokens=15))
    driver.run()
    turn = [*driver.requests[0].prompt_token_ids, *driver.outcomes[0].token_ids, 9]
    driver.add(make_request(1, turn, arrival_ns=driver.clock.now_ns()))
    usage = driver.run()[1].usage
    assert usage is not None
    assert usage.num_cached_tokens == 20  # of 21, the last of which was drawn and never computed


def test_lower_claims_are_asked_again_when_others_have_ended() -> None:
    """What they hold is too little while an equal claim runs beside them; then it is what is missing."""
    driver = Driver(make_spec(num_blocks=20, block_size=4), traffic=traffic(), enable_prefix_caching=False)
    driver.add(request(driver, 0, 24, max_tokens=8, service_class="interactive"))
    driver.add(request(driver, 1, 16, max_tokens=40, service_class="batch"))
    while driver.scheduler.statistics().num_waiting:
        driver.step()
    driver.add(request(driver, 2, 60, service_class="interactive"))
    while driver.outcomes[0].finish_reason is None:
        assert driver.scheduler.statistics().num_claim_preemptions == 0
        driver.step()
    driver.step()
    assert driver.scheduler.statistics().num_claim_preemptions == 1
    driver.run()
    assert driver.outcomes[2].event_steps[-1] < driver.outcomes[1].event_steps[-1]
    assert_as_alone(driver)


def test_idle_time_is_no_step_time() -> None:
    driver = Driver(traffic=traffic())
    driver.step_ns = 10 * MS
    for number in range(12):
        driver.add(request(driver, number, max_tokens=8))
        driver.run()
    error_ratio = driver.scheduler.statistics().step_time_error_ratio
    driver.clock.advance(100)
    driver.add(request(driver, 99, max_tokens=8))
    driver.step()
    assert driver.scheduler.statistics().step_time_error_ratio <= error_ratio
    driver.run()
