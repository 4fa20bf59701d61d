"""Each cause of a stall in a situation made for it, with the right span."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.stalls import Stall, StallCause
from headrace.protocol.step import StepPlan
from headrace.scheduling import SchedulerConfig
from headrace.scheduling.stalls import StallWatch, Wait
from tests.core.driver import Driver, make_request, make_spec

MS = 1_000_000
THRESHOLD_NS = 250 * MS


def request(driver: Driver, request_id: int, num_prompt_tokens: int = 3, **options: object) -> GenerationRequest:
    """One that arrives now, with a prompt that shares no block with another's."""
    prompt = [2 + request_id, *range(2, 60), *range(2, 60), *range(2, 60), *range(2, 60)][:num_prompt_tokens]
    options = {"arrival_ns": driver.clock.now_ns(), "max_tokens": 50, **options}
    return make_request(request_id, prompt, **options)  # type: ignore[arg-type]


def step(driver: Driver, duration_ms: int) -> StepPlan:
    """One that takes so long, the driver's own millisecond before it included."""
    driver.step_ns = (duration_ms - 1) * MS
    return driver.step()


def now(driver: Driver) -> int:
    return driver.clock.now_ns()


def test_who_gets_on_has_no_stalls() -> None:
    driver = Driver()
    driver.add(request(driver, 0), request(driver, 1))
    driver.step_ns = 248 * MS
    driver.run()
    assert driver.stalls(0) == driver.stalls(1) == []


def test_between_tokens_a_long_prompt_of_another() -> None:
    """Chunking off: the whole prompt is computed in one step."""
    driver = Driver(max_num_batched_tokens=256)
    driver.add(request(driver, 0))
    step(driver, 10)
    began_ns = now(driver)
    driver.add(request(driver, 1, 200))
    step(driver, 300)
    assert driver.stalls(0) == [Stall(StallCause.PREFILL, began_ns, 300 * MS)]
    assert driver.stalls(1) == []  # its own prompt was computed


def test_between_tokens_a_slow_step() -> None:
    driver = Driver()
    driver.add(request(driver, 0), request(driver, 1))
    step(driver, 10)
    step(driver, 10)
    began_ns = now(driver)
    step(driver, 300)
    assert driver.stalls(0) == driver.stalls(1) == [Stall(StallCause.SLOW_STEP, began_ns, 300 * MS)]


def test_between_tokens_a_slow_step_with_a_short_prompt_in_it() -> None:
    """Two prompt tokens beside those of four streams did not make the step long."""
    driver = Driver(max_num_seqs=5)
    driver.add(*(request(driver, number) for number in range(4)))
    step(driver, 10)
    step(driver, 10)
    driver.add(request(driver, 4, 2))
    step(driver, 300)
    assert [stall.cause for number in range(4) for stall in driver.stalls(number)] == [StallCause.SLOW_STEP] * 4


def test_between_tokens_a_slow_step_after_an_earlier_long_prompt() -> None:
    """Each gap is judged by its own steps."""
    driver = Driver(max_num_batched_tokens=256)
    driver.add(request(driver, 0))
    step(driver, 10)
    driver.add(request(driver, 1, 200, max_tokens=1))
    step(driver, 600)
    step(driver, 300)
    assert [stall.cause for stall in driver.stalls(0)] == [StallCause.PREFILL, StallCause.SLOW_STEP]


def test_in_the_queue_no_slot() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(request(driver, 0, max_tokens=40))
    step(driver, 10)
    driver.add(request(driver, 1))
    began_ns = now(driver)
    assert driver.scheduler.statistics().blocked_by is None
    while len(driver.outcomes[0].token_ids) < 40:
        step(driver, 10)
        assert driver.scheduler.statistics().blocked_by is (StallCause.NO_SLOT if driver.outcomes[1].usage is None else None)
    ended_ns = now(driver)
    step(driver, 10)
    assert driver.stalls(1) == [Stall(StallCause.NO_SLOT, began_ns, ended_ns + MS - began_ns)]
    assert driver.outcomes[1].first_scheduled_ns == ended_ns + MS
    assert driver.scheduler.statistics().blocked_by is None


def test_in_the_queue_no_blocks() -> None:
    driver = Driver(make_spec(num_blocks=12, block_size=4), max_num_batched_tokens=64)
    driver.add(request(driver, 0, 20, max_tokens=28))
    step(driver, 10)
    driver.add(request(driver, 1, 30))
    driver.step_ns = 10 * MS
    while driver.outcomes[0].finish_reason is None:
        driver.step()
    assert driver.scheduler.statistics().blocked_by is StallCause.NO_BLOCKS
    step(driver, 10)
    assert [stall.cause for stall in driver.stalls(1)] == [StallCause.NO_BLOCKS]


def test_in_the_queue_no_budget() -> None:
    """A chunk of the one and the whole other prompt are more than the step holds."""
    driver = Driver(max_num_batched_tokens=16, min_chunk_tokens=16)
    driver.add(request(driver, 0, 128))
    step(driver, 10)
    driver.add(request(driver, 1))
    began_ns = now(driver)
    for _ in range(7):
        step(driver, 50)
        assert driver.scheduler.statistics().blocked_by is StallCause.NO_BUDGET
    waited_ns = now(driver) + MS - began_ns
    step(driver, 50)
    assert driver.stalls(1) == [Stall(StallCause.NO_BUDGET, began_ns, waited_ns)]


def test_in_the_queue_a_busy_worker() -> None:
    """It arrived while a long step was under way."""
    driver = Driver()
    driver.add(request(driver, 0))
    plan = driver.schedule()
    arrival_ns = now(driver)
    driver.clock.advance_ns(400 * MS)
    driver.apply(plan, driver.executor.execute(plan))
    driver.add(request(driver, 1, arrival_ns=arrival_ns))
    step(driver, 10)
    assert driver.stalls(1) == [Stall(StallCause.WORKER_BUSY, arrival_ns, 401 * MS)]


def test_the_largest_share_of_a_wait_in_the_queue_names_it() -> None:
    """A hundred milliseconds for the step that ran, then three hundred for a slot."""
    driver = Driver(max_num_seqs=1)
    driver.add(request(driver, 0, max_tokens=32))
    step(driver, 10)
    arrival_ns = now(driver) - 100 * MS
    driver.add(request(driver, 1, arrival_ns=arrival_ns))
    while driver.outcomes[0].finish_reason is None:
        step(driver, 10)
    step(driver, 10)
    assert driver.stalls(1) == [Stall(StallCause.NO_SLOT, arrival_ns, 100 * MS + 31 * 10 * MS + MS)]


def test_the_worker_may_have_the_largest_share() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(request(driver, 0, max_tokens=8))
    step(driver, 10)
    arrival_ns = now(driver) - 200 * MS
    driver.add(request(driver, 1, arrival_ns=arrival_ns))
    while driver.outcomes[0].finish_reason is None:
        step(driver, 10)
    step(driver, 10)
    assert driver.stalls(1) == [Stall(StallCause.WORKER_BUSY, arrival_ns, 200 * MS + 7 * 10 * MS + MS)]


def test_a_cancellation_after_a_long_step_counts_that_step() -> None:
    """The step in which it was not admitted is the whole of its wait."""
    driver = Driver(max_num_seqs=1)
    driver.add(request(driver, 0, max_tokens=100))
    step(driver, 10)
    began_ns = now(driver)
    driver.add(request(driver, 1))
    step(driver, 400)
    driver.cancel(1)
    assert driver.stalls(1) == [Stall(StallCause.NO_SLOT, began_ns, 400 * MS)]


def test_preempted() -> None:
    """MET-05: the gap that a preemption makes is told with its cause, and when it began an event says so."""
    driver = Driver(make_spec(num_blocks=9, block_size=4, max_model_len=36), max_num_seqs=2, enable_prefix_caching=False)
    driver.add(request(driver, 0, 11, max_tokens=20), request(driver, 1, 11, max_tokens=20))
    driver.step_ns = 49 * MS
    preempted_ns = 0
    while driver.outcomes[1].usage is None or driver.outcomes[1].finish_reason is None:
        num_preemptions = driver.scheduler.statistics().num_preemptions
        driver.step()
        if driver.scheduler.statistics().num_preemptions > num_preemptions:
            preempted_ns = now(driver) - driver.step_ns
            assert driver.oracles[1]._preempted_ns == preempted_ns  # its event came with the step that took the memory
    (stall,) = driver.stalls(1)
    assert (stall.cause, stall.began_ns) == (StallCause.PREEMPTED, preempted_ns)
    assert stall.duration_ns > THRESHOLD_NS
    assert driver.outcomes[1].usage.num_preemptions == 1
    assert driver.stalls(0) == []


def test_the_end_in_the_queue_cuts_a_wait_off() -> None:
    """Deadline and cancellation: the terminal event has the stall, up to the end."""
    driver = Driver(max_num_seqs=1)
    driver.add(request(driver, 0, max_tokens=100))
    step(driver, 10)
    began_ns = now(driver)
    driver.add(request(driver, 1, deadline_ns=began_ns + 300 * MS), request(driver, 2))
    while driver.outcomes[1].finish_reason is None:
        step(driver, 10)
    assert driver.outcomes[1].finish_reason is FinishReason.DEADLINE
    (stall,) = driver.stalls(1)
    assert (stall.cause, stall.began_ns) == (StallCause.NO_SLOT, began_ns)
    assert 300 * MS <= stall.duration_ns <= 311 * MS
    driver.cancel(2)
    assert driver.stalls(2) == [Stall(StallCause.NO_SLOT, began_ns, now(driver) - began_ns)]


def test_an_end_before_any_step_cuts_off_the_wait_for_the_worker() -> None:
    driver = Driver()
    driver.add(request(driver, 0, arrival_ns=now(driver) - 300 * MS))
    driver.cancel(0)
    assert driver.stalls(0) == [Stall(StallCause.WORKER_BUSY, now(driver) - 300 * MS, 300 * MS)]


def test_a_step_that_fails_late_is_told_with_the_end() -> None:
    """Its own prompt was computed in vain (no stall); the stream beside it waited for that prompt."""
    driver = Driver(max_num_batched_tokens=64)
    driver.add(request(driver, 0))
    step(driver, 10)
    began_ns = now(driver)
    driver.add(request(driver, 1, 40))
    plan = driver.schedule()
    driver.clock.advance_ns(300 * MS)
    driver.scheduler.fail_step(plan, "execution_failed", "device lost", now(driver))
    driver._collect()
    assert driver.stalls(0) == [Stall(StallCause.PREFILL, began_ns, 301 * MS)]
    assert driver.stalls(1) == []


def test_preempted_again_before_its_next_token_is_one_wait() -> None:
    watch, wait = StallWatch(THRESHOLD_NS), Wait()
    watch.queue(wait, 0)
    watch.begin_step(0)
    watch.admit(wait, 0)
    watch.progress(wait, 10 * MS)
    watch.preempt(wait, 20 * MS)
    watch.admit(wait, 100 * MS)
    watch.preempt(wait, 400 * MS)
    watch.admit(wait, 500 * MS)
    watch.progress(wait, 600 * MS)
    assert wait.take_stalls() == (Stall(StallCause.PREEMPTED, 20 * MS, 580 * MS),)


def test_preempted_in_the_middle_of_a_long_wait() -> None:
    """What was waited up to then is told by itself."""
    watch, wait = StallWatch(THRESHOLD_NS), Wait()
    watch.queue(wait, 0)
    watch.begin_step(0)
    watch.admit(wait, 0)
    watch.progress(wait, 10 * MS)
    watch.preempt(wait, 400 * MS)
    watch.cut(wait, 700 * MS)
    assert wait.stalls == (
        Stall(StallCause.SLOW_STEP, 10 * MS, 390 * MS),
        Stall(StallCause.PREEMPTED, 400 * MS, 300 * MS),
    )


def test_who_comes_and_goes_between_two_steps_leaves_nothing_behind() -> None:
    """However many do, while no step is planned."""
    driver = Driver()
    for number in range(100):
        driver.add(request(driver, number))
        driver.cancel(number)
    assert not driver.scheduler._stalls._arrived


class TestPrefill:
    """The parts of a prefill's steps that others had."""

    def watch(self) -> tuple[StallWatch, Wait]:
        """A request that was admitted at 0 in a step."""
        watch, wait = StallWatch(THRESHOLD_NS), Wait()
        watch.queue(wait, 0)
        watch.begin_step(0)
        watch.admit(wait, 0)
        return watch, wait

    def test_own_tokens_are_no_wait(self) -> None:
        watch, wait = self.watch()
        watch.end_step(None, num_tokens=100, num_prefill_tokens=100)
        watch.land(5000 * MS)
        watch.share(wait, 100)
        watch.progress(wait, 5000 * MS)
        assert wait.take_stalls() == ()

    def test_the_prompts_of_others(self) -> None:
        """4 of 100 tokens are its own, 60 are of others' prompts, 36 of streams: it waited for 96 of 100."""
        watch, wait = self.watch()
        watch.end_step(None, num_tokens=100, num_prefill_tokens=64)
        watch.land(300 * MS)
        watch.share(wait, 4)
        watch.progress(wait, 300 * MS)
        assert wait.take_stalls() == (Stall(StallCause.PREFILL, 0, 288 * MS),)
        assert wait.take_stalls() == ()

    def test_the_tokens_of_streams(self) -> None:
        """A prompt of a single token in a slow step."""
        watch, wait = self.watch()
        watch.end_step(None, num_tokens=10, num_prefill_tokens=0)
        watch.land(500 * MS)
        watch.share(wait, 1)
        watch.progress(wait, 500 * MS)
        assert wait.take_stalls() == (Stall(StallCause.SLOW_STEP, 0, 450 * MS),)

    def test_steps_without_a_row_of_it(self) -> None:
        """Two steps with its own tokens only, 200 ms between them in which others were served, and idle time between steps."""
        watch, wait = self.watch()
        watch.end_step(None, num_tokens=8, num_prefill_tokens=8)
        watch.land(100 * MS)
        watch.share(wait, 8)
        for began_ms in (110, 210):
            watch.begin_step(began_ms * MS)
            watch.end_step(None, num_tokens=8, num_prefill_tokens=8)
            watch.land((began_ms + 90) * MS)
        watch.begin_step(360 * MS)
        watch.end_step(None, num_tokens=8, num_prefill_tokens=8)
        watch.land(500 * MS)
        watch.share(wait, 8)
        watch.progress(wait, 500 * MS)
        assert wait.take_stalls() == (Stall(StallCause.NO_BUDGET, 0, 260 * MS),)

    def test_time_between_steps_is_nobodys(self) -> None:
        watch, wait = self.watch()
        for began_ms in range(0, 5000, 100):
            watch.begin_step(began_ms * MS)
            watch.end_step(None, num_tokens=8, num_prefill_tokens=8)
            watch.land((began_ms + 50) * MS)
            watch.share(wait, 8)
        watch.progress(wait, 4950 * MS)
        assert wait.take_stalls() == ()

    @given(
        st.lists(
            st.tuples(st.integers(0, 300), st.integers(1, 400), st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)),
            min_size=1,
            max_size=8,
        )
    )
    def test_no_more_is_waited_than_time_has_passed(self, steps: list[tuple[int, int, int, int, int]]) -> None:
        """(idle, duration, own tokens, others' single tokens, others' prompt tokens) for each step."""
        watch, wait = self.watch()
        watch.end_step(None, 0, 0)
        now_ns = own_ns = 0
        for idle_ms, duration_ms, num_own, num_single, num_prompt in steps:
            now_ns += idle_ms * MS
            watch.begin_step(now_ns)
            num_prompt += num_prompt == 1
            num_tokens = num_own + num_single + num_prompt
            watch.end_step(None, num_tokens, num_prompt + (num_own if num_own > 1 else 0))
            now_ns += duration_ms * MS
            if num_tokens:
                watch.land(now_ns)
                own_ns += duration_ms * MS * num_own // num_tokens
                if num_own:
                    watch.share(wait, num_own)
        watch.progress(wait, now_ns)
        waited_ns = sum(stall.duration_ns for stall in wait.stalls)
        assert waited_ns <= now_ns - own_ns


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="stall_threshold_ns"):
        SchedulerConfig(4, 16, 64, stall_threshold_ns=0)


def test_running_and_waiting_by_class() -> None:
    """A class that the policy does not have counts as the default one (the gateway lets none through)."""
    driver = Driver(max_num_seqs=2)
    classes = ("interactive", "batch", "batch", "interactive", "standard", "unheard of")
    driver.add(*(request(driver, number, service_class=name) for number, name in enumerate(classes)))
    assert driver.scheduler.statistics().num_waiting_by_class == (2, 2, 2)
    step(driver, 10)
    statistics = driver.scheduler.statistics()
    assert (statistics.num_running_by_class, statistics.num_waiting_by_class) == ((2, 0, 0), (0, 2, 2))
    driver.run()
    statistics = driver.scheduler.statistics()
    assert statistics.num_running_by_class == statistics.num_waiting_by_class == (0, 0, 0)
