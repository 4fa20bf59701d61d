"""Admission by forecast: what is let in meets its target, what is refused hears when to come, and who comes then is let in."""

import bisect
import heapq
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.admission import AdmissionControl, AdmissionLimits, Permit
from headrace.gateway.drain import DrainMeter, PlaceMeter, mean_place_ns
from headrace.gateway.forecast import fair_tokens_ahead
from headrace.gateway.outlook import Applicant
from headrace.gateway.promises import MAX_PROMISES, Promise, PromiseBook, expiry_of
from headrace.protocol.errors import ErrorCode, RejectReason, RequestError
from headrace.protocol.traffic import BATCH, INTERACTIVE, STANDARD, ServiceClass, Tenant, TrafficPolicy

SECOND = 1_000_000_000
TENANTS = (Tenant(name="default"), Tenant(name="other"), Tenant(name="heavy"), Tenant(name="light"))
TRAFFIC = TrafficPolicy(tenants=TENANTS)
RATE = 1000  # tokens a second that the fluid server drains


@dataclass
class FluidServer:
    """Computes waiting prompts at RATE tokens a second: by class level and arrival, the first two of a level in equal parts."""

    admission: AdmissionControl
    now_ns: int = SECOND
    waiting: list[tuple[int, int, Permit, int]] = field(default_factory=list)
    left: dict[int, float] = field(default_factory=dict)  # tokens to compute, by number
    waits: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def push(self, permit: Permit) -> None:
        self.count += 1
        bisect.insort(
            self.waiting, (permit.applicant.service_class.level, self.count, permit, self.now_ns), key=lambda e: e[:2]
        )
        self.left[self.count] = permit.num_tokens

    def run_until(self, until_ns: int) -> None:
        while self.waiting and self.now_ns < until_ns:
            active = [entry for entry in self.waiting[:2] if entry[0] == self.waiting[0][0]]
            least = min(self.left[entry[1]] for entry in active)
            elapsed_ns = min(round(least * len(active) * SECOND / RATE), until_ns - self.now_ns)
            self.now_ns += elapsed_ns
            for entry in active:
                self.left[entry[1]] -= elapsed_ns * RATE / SECOND / len(active)
                if self.left[entry[1]] < 1e-3:
                    self._end(entry)
        self.now_ns = max(self.now_ns, until_ns)

    def _end(self, entry: tuple[int, int, Permit, int]) -> None:
        _, number, permit, arrived_ns = entry
        self.waiting.remove(entry)
        del self.left[number]
        self.waits.setdefault(permit.applicant.service_class.name, []).append((self.now_ns - arrived_ns) / SECOND)
        permit.leave_queue(self.now_ns)
        permit.release(self.now_ns, completed=True)


def ask(server: FluidServer, tokens: int, now_ns: int, applicant: Applicant) -> RequestError | None:
    """Ask to be let in; the refusal, if it is one."""
    try:
        server.push(server.admission.admit(tokens, now_ns, applicant))
    except RequestError as error:
        return error
    return None


def overload(factor: float, seconds: float, seed: int) -> tuple[FluidServer, list[bool], list[bool]]:
    """Poisson arrivals at `factor` times what the server can do; refused callers come again as told, at most 3 times.

    Returns the server, and for first and for returning calls whether they were let in.
    """
    source = random.Random(seed)
    admission = AdmissionControl(AdmissionLimits(10_000, 10_000_000, max_num_seqs=10_000, traffic=TRAFFIC), source.random)
    server = FluidServer(admission)
    calls: list[tuple[float, int, int, int]] = []
    at, number = 0.0, 0
    while at < seconds:
        tokens = source.choice((50, 100, 200, 400))
        heapq.heappush(calls, (at, number, tokens, 0))
        at += source.expovariate(factor * RATE / 187.5)
        number += 1
    first: list[bool] = []
    returning: list[bool] = []
    while calls:
        at, number, tokens, tries = heapq.heappop(calls)
        now_ns = SECOND + round(at * SECOND)
        server.run_until(now_ns)
        applicant = Applicant(INTERACTIVE, "default", b"%d" % number)
        error = ask(server, tokens, now_ns, applicant)
        if error is not None:
            assert error.reject_reason is RejectReason.PREDICTED_TTFT
            assert error.retry_after_seconds is not None
            if tries < 3:
                heapq.heappush(calls, (at + error.retry_after_seconds, number, tokens, tries + 1))
        (returning if tries else first).append(error is None)
    return server, first, returning


@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0, 3.0])
def test_who_waits_as_told_is_let_in_and_targets_hold(factor: float) -> None:
    """Those let in get their first token in time, nine of ten who come when told are let in, the server is busy."""
    server, first, returning = overload(factor, 120.0, seed=1)
    assert len(returning) > 50
    assert sum(returning) / len(returning) >= 0.9
    waits = sorted(server.waits["interactive"])
    target = INTERACTIVE.ttft_target_ms / 1000
    assert waits[int(0.99 * len(waits))] <= 1.1 * target
    served_seconds = sum(first) + sum(returning)
    assert served_seconds * 187.5 / RATE >= 0.9 * 120.0  # nobody is refused while the server has nothing to do


def test_below_capacity_nobody_is_refused() -> None:
    _, first, returning = overload(0.5, 120.0, seed=2)
    assert sum(first) / len(first) > 0.99
    assert len(returning) <= len(first) - sum(first)


def warmed(traffic: TrafficPolicy = TRAFFIC, draw: float = 0.5) -> AdmissionControl:
    """An admission that has measured RATE."""
    admission = AdmissionControl(AdmissionLimits(10_000, 10_000_000, max_num_seqs=10_000, traffic=traffic), lambda: draw)
    for permit in [admission.admit(RATE // 2, SECOND) for _ in range(2)]:
        permit.leave_queue(2 * SECOND)
        permit.release(2 * SECOND, completed=True)
    return admission


def refused(admission: AdmissionControl, tokens: int, applicant: Applicant, now_ns: int = 2 * SECOND) -> RequestError:
    with pytest.raises(RequestError) as caught:
        admission.admit(tokens, now_ns, applicant)
    return caught.value


def test_the_heavy_tenant_hears_429_and_the_light_one_is_let_in() -> None:
    admission = warmed()
    heavy, light = Applicant(INTERACTIVE, "heavy"), Applicant(INTERACTIVE, "light")
    admission.admit(100, 2 * SECOND, light)
    while True:
        try:
            admission.admit(200, 2 * SECOND, heavy)
        except RequestError as error:
            found = error
            break
    assert (found.code, found.reject_reason) == (ErrorCode.TENANT_OVER_SHARE, RejectReason.TENANT_SHARE)
    assert found.code.value.http_status == 429
    assert found.retry_after_seconds is not None
    admission.admit(200, 2 * SECOND, light)  # waits for its own 100 and a fair part of the other's


def test_alone_on_the_server_a_tenant_hears_503() -> None:
    admission = warmed()
    heavy = Applicant(INTERACTIVE, "heavy")
    for _ in range(8):
        admission.admit(180, 2 * SECOND, heavy)
    error = refused(admission, 400, heavy)
    assert (error.code, error.reject_reason) == (ErrorCode.OVERLOADED, RejectReason.PREDICTED_TTFT)


def test_a_higher_class_does_not_wait_for_a_lower_one() -> None:
    admission = warmed()
    for _ in range(40):
        admission.admit(5000, 2 * SECOND, Applicant(BATCH))
    assert admission.predicted_wait_ns(100, 2 * SECOND, Applicant(INTERACTIVE)) == 0
    admission.admit(100, 2 * SECOND, Applicant(INTERACTIVE))
    assert admission.predicted_wait_ns(100, 2 * SECOND, Applicant(STANDARD)) == SECOND // 10


def test_a_prompt_that_takes_long_by_itself_is_let_into_an_idle_server() -> None:
    admission = warmed()
    admission.admit(100 * RATE, 2 * SECOND, Applicant(INTERACTIVE))


def test_nothing_measured_refuses_nobody_but_by_the_bounds() -> None:
    admission = AdmissionControl(AdmissionLimits(5, 10_000_000, max_num_seqs=5, traffic=TRAFFIC))
    for _ in range(5):
        admission.admit(100_000, SECOND, Applicant(INTERACTIVE))
    assert refused(admission, 1, Applicant(INTERACTIVE), SECOND).reject_reason is RejectReason.QUEUE_FULL


def test_background_work_is_shed_the_more_the_nearer_others_are_to_their_targets() -> None:
    shed = []
    for num_ahead in range(16):
        admission = warmed(draw=0.2)
        for _ in range(num_ahead):
            admission.admit(100, 2 * SECOND, Applicant(INTERACTIVE))
        error = ask(FluidServer(admission), 100, 2 * SECOND, Applicant(BATCH))
        shed.append(error is not None)
        if error is not None:
            assert error.reject_reason is RejectReason.SHED
            assert "batch" in error.message
    assert not shed[0]
    assert shed == sorted(shed)
    assert shed[-1]


def test_background_work_that_comes_again_as_told_is_not_shed_anew() -> None:
    """However near the others are to their targets: it was told that it would be let in."""
    admission = warmed(draw=0.0)
    server = FluidServer(admission, now_ns=2 * SECOND)
    for _ in range(12):
        assert ask(server, 100, server.now_ns, Applicant(INTERACTIVE)) is None
    told = refused(admission, 100, Applicant(BATCH, digest=b"told"))
    assert told.reject_reason is RejectReason.SHED
    too_early = refused(admission, 100, Applicant(BATCH, digest=b"told"), server.now_ns + 9 * SECOND // 10)
    assert too_early.reject_reason is RejectReason.SHED
    server.run_until(2 * SECOND + told.retry_after_seconds * SECOND)
    while len(server.waiting) < 12:
        assert ask(server, 100, server.now_ns, Applicant(INTERACTIVE)) is None
    new = ask(server, 100, server.now_ns, Applicant(BATCH, digest=b"new"))
    assert new is not None
    assert new.reject_reason is RejectReason.SHED
    assert ask(server, 100, server.now_ns, Applicant(BATCH, digest=b"told")) is None


@pytest.mark.parametrize("every_ns", [SECOND // 10, 3 * SECOND // 10, 7 * SECOND // 10, 9 * SECOND // 10, SECOND])
@pytest.mark.parametrize("service_class", [INTERACTIVE, BATCH])
def test_a_place_does_not_recede_from_who_asks_again_and_again(service_class: ServiceClass, every_ns: int) -> None:
    """Also a stranger with the same request, who asks meanwhile, does not move it."""
    admission = warmed(draw=0.0)
    server = FluidServer(admission, now_ns=2 * SECOND)
    while ask(server, 100, server.now_ns, Applicant(INTERACTIVE)) is None:
        pass
    applicant = Applicant(service_class, digest=b"mine")
    told = refused(admission, 100, applicant)
    due_ns = 2 * SECOND + told.retry_after_seconds * SECOND
    for now_ns in range(2 * SECOND + every_ns, due_ns - SECOND // 2, every_ns):
        server.run_until(now_ns)
        while ask(server, 100, now_ns, Applicant(INTERACTIVE)) is None:
            pass  # newcomers keep it full
        again = ask(server, 100, now_ns, applicant)
        if again is None:
            return  # let in before its time, as a newcomer
        assert now_ns + again.retry_after_seconds * SECOND < due_ns + SECOND
    server.run_until(due_ns)
    assert ask(server, 100, due_ns, applicant) is None


def test_background_work_is_told_times_behind_each_other() -> None:
    """They were not let in together, and together they would come again."""
    admission = warmed(draw=0.0)
    server = FluidServer(admission, now_ns=2 * SECOND)
    while ask(server, 100, server.now_ns, Applicant(INTERACTIVE)) is None:
        pass
    told = [refused(admission, 100, Applicant(BATCH, digest=b"%d" % number)) for number in range(200)]
    assert {error.reject_reason for error in told} == {RejectReason.SHED}
    times = [error.retry_after_seconds for error in told]
    assert times == sorted(times)
    assert times[-1] >= 0.8 * 200 * 100 / RATE, "as long as their prompts take, those left out who do not come"


def test_a_place_is_kept_for_whom_bounds_refuse_when_it_comes() -> None:
    """Between the look at the forecast and admission others may fill what is left."""
    limits = AdmissionLimits(12, 10_000_000, max_num_seqs=8, traffic=TRAFFIC)
    admission = AdmissionControl(limits, lambda: 1.0)
    for permit in [admission.admit(RATE // 2, SECOND) for _ in range(2)]:
        permit.leave_queue(2 * SECOND)
        permit.release(2 * SECOND, completed=True)
    server = FluidServer(admission, now_ns=2 * SECOND)
    while ask(server, 400, server.now_ns, Applicant(INTERACTIVE)) is None:
        pass
    applicant = Applicant(INTERACTIVE, digest=b"mine")
    told = refused(admission, 400, applicant)
    assert told.reject_reason is RejectReason.PREDICTED_TTFT
    now_ns = 2 * SECOND + told.retry_after_seconds * SECOND
    server.run_until(now_ns)
    admission.check(400, now_ns, applicant)
    batch = [admission.admit(1, now_ns, Applicant(BATCH)) for _ in range(12 - len(server.waiting))]
    with pytest.raises(RequestError) as caught:
        admission.admit_call([400], now_ns, applicant, was_checked=True)
    assert caught.value.reject_reason is RejectReason.QUEUE_FULL
    assert len(admission.promises) == 1
    for permit in batch:
        permit.release(now_ns, completed=True)
    later_ns = now_ns + caught.value.retry_after_seconds * SECOND
    server.run_until(later_ns)
    assert ask(server, 400, later_ns, applicant) is None
    assert len(admission.promises) == 0


def test_who_comes_as_told_into_a_free_place_has_kept_its_promise() -> None:
    admission = warmed()
    server = FluidServer(admission, now_ns=2 * SECOND)
    while ask(server, 100, server.now_ns, Applicant(INTERACTIVE)) is None:
        pass
    told = refused(admission, 100, Applicant(INTERACTIVE, digest=b"mine"))
    server.run_until(60 * SECOND)
    assert not server.waiting
    now_ns = 2 * SECOND + told.retry_after_seconds * SECOND
    assert ask(server, 100, now_ns, Applicant(INTERACTIVE, digest=b"mine")) is None
    assert (admission.promises.num_kept, admission.promises.num_broken, len(admission.promises)) == (1, 0, 0)


def test_who_asks_too_early_keeps_its_place() -> None:
    admission = warmed()
    for number in range(8):
        admission.admit(200, 2 * SECOND, Applicant(INTERACTIVE, digest=b"x%d" % number))
    early = refused(admission, 400, Applicant(INTERACTIVE, digest=b"early"))
    for number in range(20):
        refused(admission, 400, Applicant(INTERACTIVE, digest=b"later%d" % number))
    again = refused(admission, 400, Applicant(INTERACTIVE, digest=b"early"))
    assert again.retry_after_seconds == early.retry_after_seconds
    last = refused(admission, 400, Applicant(INTERACTIVE, digest=b"last"))
    assert last.retry_after_seconds > early.retry_after_seconds


def test_a_class_has_bounds_of_its_own() -> None:
    narrow = TrafficPolicy(
        classes=(
            INTERACTIVE,
            STANDARD,
            BATCH.__class__(name="batch", level=2, ttft_target_ms=1e6, tbt_target_ms=0, max_queued_requests=2),
        )
    )
    admission = AdmissionControl(AdmissionLimits(100, 10_000, max_num_seqs=1, traffic=narrow))
    batch = Applicant(narrow.class_of("batch"))
    admission.admit(1, SECOND, batch)
    admission.admit(1, SECOND, batch)
    error = refused(admission, 1, batch, SECOND)
    assert error.reject_reason is RejectReason.CLASS_QUEUE_FULL
    admission.admit(1, SECOND, Applicant(INTERACTIVE))


MS = 1_000_000


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "give_up", "full", "free"]), st.integers(0, 300)), max_size=60))
def test_the_drain_rate_is_tokens_over_the_time_in_which_prompts_wait_to_be_computed(steps: list[tuple[str, int]]) -> None:
    """Within one window: a prompt's tokens by the part of its open time in which it had company, over all such time."""
    meter: DrainMeter[int] = DrainMeter()
    now_ns, busy_ns, tokens, is_open, next_id = 0, 0, 0.0, True, 0
    waiting: dict[int, list[int]] = {}  # open time, time in company
    for kind, duration_ms in steps:
        step_ns = min(duration_ms, 100) * MS
        now_ns += step_ns
        is_busy = is_open and len(waiting) >= 2
        busy_ns += step_ns * is_busy
        for times in waiting.values():
            times[0] += step_ns * is_open
            times[1] += step_ns * is_busy
        if kind == "enter":
            meter.enter(next_id, 100, now_ns)
            waiting[next_id] = [0, 0]
            next_id += 1
        elif kind in ("full", "free"):
            is_open = kind == "free"
            meter.set_places(now_ns, has_places=is_open)
        elif waiting:
            gone = next(iter(waiting))
            open_ns, company_ns = waiting.pop(gone)
            meter.leave(gone, now_ns, was_computed=kind == "leave")
            tokens += 100 * company_ns / open_ns if kind == "leave" and open_ns else 0
    while waiting:  # nobody is under way any more
        gone, _ = waiting.popitem()
        meter.leave(gone, now_ns, was_computed=False)
    rate = meter.tokens_per_second(now_ns)
    if busy_ns >= 200 * MS and tokens > 20:
        assert rate == pytest.approx(tokens * SECOND / busy_ns, abs=len(steps) * SECOND / busy_ns)
    elif busy_ns < 200 * MS:
        assert rate is None


def pair(meter: DrainMeter[int], num_tokens: int, at_ns: int, duration_ns: int) -> None:
    """Two prompts that wait together and are computed."""
    for who in (1, 2):
        meter.enter(who, num_tokens, at_ns)
    for who in (1, 2):
        meter.leave(who, at_ns + duration_ns, was_computed=True)


def test_waiting_for_a_place_is_not_slow_computing() -> None:
    """Two answers of 12 s hold both places and a short prompt waits: what comes afterwards is not turned away for that."""
    meter: DrainMeter[int] = DrainMeter()
    pair(meter, 100, SECOND, SECOND // 2)
    assert meter.tokens_per_second(2 * SECOND) == 400
    meter.set_places(2 * SECOND, has_places=False)
    pair(meter, 10, 3 * SECOND, 12 * SECOND)
    assert meter.tokens_per_second(15 * SECOND) == 400


def test_reading_the_rate_changes_nothing() -> None:
    def rate(*readings_ns: int) -> float | None:
        meter: DrainMeter[int] = DrainMeter()
        for second in range(1, 30, 4):
            pair(meter, 100 * second, second * SECOND, SECOND)
            for reading_ns in readings_ns:
                meter.tokens_per_second(second * SECOND + reading_ns)
        return meter.tokens_per_second(60 * SECOND)

    assert rate() == rate(SECOND, 2 * SECOND, 3 * SECOND) == rate(3 * SECOND)


def test_a_long_prompt_under_way_is_no_standstill() -> None:
    """A prompt of 6,000 tokens takes six seconds; short ones beside it are done at once and let in all the time."""
    admission = AdmissionControl(AdmissionLimits(1000, 10**6, max_num_seqs=16, traffic=TRAFFIC))
    now_ns = SECOND
    for turn in range(3):
        long = admission.admit(6000, now_ns, Applicant(digest=b"long%d" % turn))
        for number in range(24):
            now_ns += 200 * MS
            short = admission.admit(3, now_ns, Applicant(digest=b"%d-%d" % (turn, number)))
            now_ns += 50 * MS
            short.leave_queue(now_ns)
            short.release(now_ns, completed=True)
        long.leave_queue(now_ns)
        long.release(now_ns, completed=True)


def test_who_can_begin_at_once_is_let_in_whatever_was_measured_and_promised() -> None:
    admission = AdmissionControl(AdmissionLimits(1000, 10**6, max_num_seqs=2, traffic=TRAFFIC))
    slow = [admission.admit(10, SECOND, Applicant(digest=b"slow%d" % number)) for number in range(2)]
    for permit in slow:  # a token a second
        permit.leave_queue(11 * SECOND)
        permit.release(11 * SECOND, completed=True)
    held = [admission.admit(12, 12 * SECOND, Applicant(digest=b"held"))]
    for number in range(20):
        refused(admission, 12, Applicant(digest=b"refused%d" % number), 12 * SECOND)
    held[0].release(12 * SECOND, completed=True)
    assert len(admission.promises) == 20
    for second in range(13, 400):
        permit = admission.admit(12, second * SECOND, Applicant(digest=b"lonely%d" % second))
        permit.leave_queue(second * SECOND + 20 * MS)
        permit.release(second * SECOND + 30 * MS, completed=True)


def test_one_short_answer_beside_long_ones_does_not_make_them_endless() -> None:
    """All of 16 places were taken 3 s ago and one short answer was given: a place is not kept for 48 s therefore."""
    meter: PlaceMeter[int] = PlaceMeter()
    meter.take(0, SECOND)
    meter.give_back(0, SECOND + 200 * MS)
    assert mean_place_ns({0: meter}, 0, 2 * SECOND) == 0.2 * SECOND
    for who in range(1, 17):
        meter.take(who, 2 * SECOND)
    assert mean_place_ns({0: meter}, 0, 5 * SECOND) == 3 * SECOND
    for who in range(1, 17):
        meter.give_back(who, 7 * SECOND)
    assert 3.5 * SECOND < mean_place_ns({0: meter}, 0, 8 * SECOND) <= 5 * SECOND  # both sums fade, the time from its start


def test_a_tiny_prompt_that_waits_alone_does_not_multiply_those_who_were_told_to_come() -> None:
    """Their tokens are counted as requests of the usual length, not of the one that happens to wait."""
    admission = AdmissionControl(AdmissionLimits(1000, 10**6, max_num_seqs=2, traffic=TRAFFIC))
    running = [admission.admit(500, SECOND, Applicant(digest=b"r%d" % number)) for number in range(3)]
    for permit in running:
        permit.leave_queue(2 * SECOND)
    running[0].release(6 * SECOND, completed=True)  # places are kept for some seconds
    queue: list[Permit] = []
    tiny = admission.admit(1, 7 * SECOND, Applicant(digest=b"tiny"))
    for number in range(50):
        try:
            queue.append(admission.admit(500, 7 * SECOND, Applicant(digest=b"%d" % number)))
        except RequestError:
            continue
    num_promised = len(admission.promises)
    assert num_promised > 30
    for permit in queue:
        permit.release(8 * SECOND, completed=False)
    assert admission.num_queued_prompt_tokens == tiny.num_tokens
    told = refused(admission, 500, Applicant(digest=b"next"), 8 * SECOND).retry_after_seconds
    assert told is not None
    assert told <= (num_promised + 2) * 6


def test_answers_of_one_call_need_a_place_each() -> None:
    """Of four places three hold answers of 40 s: one more finds the last, a call of four waits for three of them."""

    def admission() -> AdmissionControl:
        made = AdmissionControl(AdmissionLimits(1000, 10**6, max_num_seqs=4, traffic=TRAFFIC))
        for number in range(4):
            permit = made.admit(10, SECOND, Applicant(digest=b"%d" % number))
            permit.leave_queue(SECOND + MS)
            if number == 3:
                permit.release(41 * SECOND, completed=True)
        return made

    admission().admit_call([10], 42 * SECOND, Applicant(digest=b"one"))
    with pytest.raises(RequestError) as caught:
        admission().admit_call([10] * 4, 42 * SECOND, Applicant(digest=b"four"))
    assert caught.value.reject_reason is RejectReason.PREDICTED_TTFT


WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}
QUEUES = st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e6), max_size=3)


@given(QUEUES, st.sampled_from("abc"), st.integers(1, 100_000))
def test_a_fair_wait_is_bounded_by_the_queue_and_by_fair_shares(queued: dict[str, float], tenant: str, tokens: int) -> None:
    ahead = fair_tokens_ahead(queued, tenant, tokens, WEIGHTS)
    assert queued.get(tenant, 0.0) <= ahead <= sum(queued.values()) + 1e-6
    share = WEIGHTS[tenant] / sum(WEIGHTS.values())
    assert ahead + tokens <= (queued.get(tenant, 0.0) + tokens) / share + 1e-6


BOOK_STEPS = ["give", "keep", "give back", "let in", "wait"]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(BOOK_STEPS), st.integers(0, 5), st.integers(0, 8)), max_size=80))
def test_the_book_counts_what_is_in_it(steps: list[tuple[str, int, int]]) -> None:
    book, model, taken, now = PromiseBook(), {}, {}, 0
    for kind, name, amount in steps:
        digest = b"%d" % name
        if kind == "give":
            due = now + amount * SECOND
            promise = Promise(digest, due, expiry_of(due, now), amount, amount % 3, "t")
            book.give(promise)
            model[digest] = promise
            taken.pop(digest, None)
        elif kind == "keep":
            held = book.get(digest, now)
            if held is not None:
                book.come(held)
                taken[digest] = model.pop(digest)
        elif kind == "give back":
            due = now + amount * SECOND
            book.give_back(digest, now, due)
            if digest in taken:
                model[digest] = replace(taken.pop(digest), due_ns=due, expires_ns=expiry_of(due, now))
        elif kind == "let in":
            book.forget(digest)
            model.pop(digest, None)
            taken.pop(digest, None)
        else:
            now += amount * SECOND
        book.forget_expired(now)
        model = {key: promise for key, promise in model.items() if promise.expires_ns > now}
        taken = {key: promise for key, promise in taken.items() if promise.expires_ns > now}
        assert {key: book.get(key, now) for key in model} == model
        assert len(book) == len(model)
        for level in range(3):
            expected = sum(promise.num_tokens for promise in model.values() if promise.level <= level) * book.kept_ratio
            assert book.tokens_by_tenant(level).get("t", 0.0) == pytest.approx(expected)
    assert 0 <= book.kept_ratio <= 1


def taken_up(book: PromiseBook) -> Promise:
    """A promise whose caller has come."""
    promise = Promise(b"mine", 5 * SECOND, 8 * SECOND, 100, 0, "t")
    book.give(promise)
    book.come(promise)
    return promise


def test_a_place_is_given_back_to_who_has_taken_it_up_and_is_not_in() -> None:
    book = PromiseBook()
    taken_up(book)
    book.give_back(b"other", 6 * SECOND, 7 * SECOND)
    assert len(book) == 0
    book.give_back(b"mine", 6 * SECOND, 7 * SECOND)
    assert book.get(b"mine", 6 * SECOND) == Promise(b"mine", 7 * SECOND, 10 * SECOND, 100, 0, "t")
    book.forget(b"mine")
    book.give_back(b"mine", 6 * SECOND, 7 * SECOND)
    assert len(book) == 0, "let in after it had come a second time"


def test_nothing_is_given_back_to_who_was_let_in_or_told_anew_or_whose_time_is_over() -> None:
    let_in, told_anew, too_late = PromiseBook(), PromiseBook(), PromiseBook()
    taken_up(let_in)
    let_in.forget(b"mine")
    promise = replace(taken_up(told_anew), due_ns=20 * SECOND, expires_ns=30 * SECOND)
    told_anew.give(promise)
    taken_up(too_late)
    too_late.forget_expired(8 * SECOND)
    for book in (let_in, told_anew, too_late):
        book.give_back(b"mine", 9 * SECOND, 10 * SECOND)
    assert (len(let_in), len(too_late)) == (0, 0)
    assert told_anew.get(b"mine", 9 * SECOND) == promise


def test_the_book_is_bounded() -> None:
    book = PromiseBook()
    for number in range(MAX_PROMISES + 10):
        promise = Promise(b"%d" % number, SECOND, 2 * SECOND, 1, 0, "t")
        book.give(promise)
    assert len(book) == MAX_PROMISES
    book.come(Promise(b"0", SECOND, 2 * SECOND, 1, 0, "t"))
    book.give(promise)
    assert len(book) == MAX_PROMISES - 1, "a place that was just taken up may have to be given back"
    book.forget(b"0")
    book.give(promise)
    assert len(book) == MAX_PROMISES
