"""Who may enter: bounds on what is in flight, a forecast of each newcomer's first token, and honest times to come again.

Owns: AdmissionControl, Permit. Runs in: gateway, simulation. Must not know: rings, HTTP, the clock (time is an
argument).

A newcomer whose first token would come too late for its class is refused at once, when that costs nothing yet (Mooncake's early
rejection, FAST 2025; QLM, SoCC 2024): 429 when its tenant's own queue is the reason, else 503. Background work is shed before
that, with a probability that rises as the square of the saturation (llm-d's probabilistic admitter).
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.gateway.drain import WINDOW_SECONDS, EventRate
from headrace.gateway.outlook import ANYBODY, Applicant, Outlook
from headrace.gateway.promises import EARLY_NS, Promise, PromiseBook, expiry_of
from headrace.protocol.errors import ErrorCode, RejectReason, RequestError
from headrace.protocol.traffic import ServiceClass, TrafficPolicy

MAX_RETRY_AFTER_SECONDS = 60  # where only a bound was met and nothing is forecast
MAX_FORECAST_RETRY_SECONDS = 3600
NEWCOMER_SHARE = 0.8  # of the time that a class allows: what is left is room for those who were told to come again
PROMISE_CAUTION = 1.15  # times that are told are so much later than the measured rate says: rates are not known exactly
SHED_FROM = 0.5  # saturation at which shedding of the lowest class begins; at 1 all of it is shed
_NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What may be in flight at once. `max_queued_prompt_tokens` counts requests that have shown no token yet."""

    max_in_flight: int  # requests that run or wait
    max_queued_prompt_tokens: int
    max_num_seqs: int = 64  # that the worker runs at once
    traffic: TrafficPolicy = field(default_factory=TrafficPolicy)
    forecasts: bool = True  # False: the bounds alone decide


class Permit:
    """The right of one request to be in flight: it lives exactly as long as the request's stream."""

    __slots__ = ("_admission", "_is_queued", "_released", "applicant", "num_tokens")

    def __init__(self, admission: "AdmissionControl", applicant: Applicant, num_prompt_tokens: int) -> None:
        self._admission = admission
        self.applicant = applicant
        self.num_tokens = num_prompt_tokens
        self._is_queued = True
        self._released = False

    def leave_queue(self, now_ns: int) -> None:
        """The prompt was computed: its tokens wait no longer. Idempotent."""
        if self._is_queued:
            self._is_queued = False
            self._admission._begin_running(self, now_ns)

    def release(self, now_ns: int, *, completed: bool) -> None:
        """The request is over. `completed`: it ran to its end, which is what the completion rate counts. Idempotent."""
        if self._released:
            return
        self._released = True
        self._admission._forget(self, now_ns, was_queued=self._is_queued, completed=completed)
        self._is_queued = False


class AdmissionControl:
    """Gives permits and counts them. A full house is an answer with Retry-After, never a wait."""

    def __init__(self, limits: AdmissionLimits, draw: Callable[[], float] | None = None) -> None:
        """`draw`: uniform in [0, 1), for shedding."""
        self._limits = limits
        self._draw = draw or random.Random(0).random  # noqa: S311 - not for secrets
        self._num_in_flight = 0
        self._outlook = Outlook(limits.max_num_seqs, limits.traffic)
        self._class_queues: dict[str, list[int]] = {name: [0, 0] for name in limits.traffic.class_names}  # requests, tokens
        self._completions = EventRate()
        self._refusals = EventRate()
        self._promises = PromiseBook()
        self._has_tenants = len(limits.traffic.tenants) > 1
        levels = sorted({entry.level for entry in limits.traffic.classes})
        self._shed_level = levels[-1] if len(levels) > 1 else None
        self._guarded = [entry for entry in limits.traffic.classes if entry.level != self._shed_level]

    @property
    def num_in_flight(self) -> int:
        """Permits that are out."""
        return self._num_in_flight

    @property
    def num_queued_prompt_tokens(self) -> int:
        """Prompt tokens of requests that have shown no token yet."""
        return self._outlook.num_tokens

    @property
    def promises(self) -> PromiseBook:
        """Callers who were told when to come again (for statistics)."""
        return self._promises

    def max_call_requests(self, applicant: Applicant) -> int:
        """A call of more requests than this can never be let in."""
        limits = self._limits
        return min(limits.max_in_flight, limits.max_num_seqs + applicant.service_class.max_queued_requests)

    def check(self, num_prompt_tokens: int, now_ns: int, applicant: Applicant = ANYBODY, num_requests: int = 1) -> None:
        """Refuse now what `admit` would refuse, before the prompt is tokenized; `num_prompt_tokens` may be an estimate.

        Requests of one call are judged as one with all their tokens.
        """
        self._check_bounds(num_prompt_tokens, now_ns, applicant, num_requests)
        if self._limits.forecasts:
            held = self._promises.get(applicant.digest, now_ns)
            comes_as_told = held is not None and now_ns >= held.due_ns - EARLY_NS
            if held is not None and comes_as_told:
                self._promises.come(held)
                held = None
            ask = _Ask(num_prompt_tokens, now_ns, applicant, num_requests, held, comes_as_told)
            self._check_forecast(ask)
            self._shed(ask)

    def admit(
        self, num_prompt_tokens: int, now_ns: int, applicant: Applicant = ANYBODY, *, was_checked: bool = False
    ) -> Permit:
        """`admit_call` for a call of one request."""
        return self.admit_call([num_prompt_tokens], now_ns, applicant, was_checked=was_checked)[0]

    def admit_call(
        self, prompt_lengths: Sequence[int], now_ns: int, applicant: Applicant = ANYBODY, *, was_checked: bool = False
    ) -> list[Permit]:
        """A permit for each request of a call, or none: RequestError OVERLOADED or TENANT_OVER_SHARE.

        `prompt_lengths`: in tokens. `was_checked`: `check` has let the call pass just now; the bounds are looked at again. The
        only waiting prompt is never too long: the worker's limits decide that.
        """
        if was_checked:
            try:
                self._check_bounds(sum(prompt_lengths), now_ns, applicant, len(prompt_lengths))
            except RequestError as error:
                due_ns = now_ns + (error.retry_after_seconds or 1) * _NS_PER_SECOND
                self._promises.give_back(applicant.digest, now_ns, due_ns)
                raise
        else:
            self.check(sum(prompt_lengths), now_ns, applicant, len(prompt_lengths))
        self._promises.forget(applicant.digest)
        permits = []
        for num_tokens in prompt_lengths:
            self._num_in_flight += 1
            self._count_class(applicant, 1, num_tokens)
            permit = Permit(self, applicant, num_tokens)
            self._outlook.queue(permit, now_ns)
            permits.append(permit)
        return permits

    def predicted_wait_ns(self, num_prompt_tokens: int, now_ns: int, applicant: Applicant = ANYBODY) -> int | None:
        """The forecast of the time until such a newcomer's prompt would begin to be computed; None: nothing measured yet."""
        return self._outlook.wait_ns(
            self._outlook.tokens_by_tenant(applicant.service_class.level), num_prompt_tokens, now_ns, applicant
        )

    def refusal(self, reason: str, now_ns: int, reject: RejectReason = RejectReason.QUEUE_FULL) -> RequestError:
        """Count one refusal; the error to answer with."""
        self._refusals.count(now_ns)
        return RequestError(
            f"{reason} Try again later.",
            code=ErrorCode.OVERLOADED,
            retry_after_seconds=self.retry_after_seconds(now_ns),
            reject_reason=reject,
        )

    def retry_after_seconds(self, now_ns: int) -> int:
        """Time in which as many requests complete as were refused lately: those callers come again too. In 1..60.

        The rate is what the server can do, as far as it was measured: idle time in the window does not lower it. With nothing
        measured and no completion in the window it is taken as one per window, its upper bound.
        """
        num_competing = max(1, self._refusals.num_recent(now_ns))
        rate_per_second = max(1, self._completions.num_recent(now_ns)) / WINDOW_SECONDS
        if request_ns := self._outlook.request_ns(now_ns):
            rate_per_second = max(rate_per_second, _NS_PER_SECOND / request_ns)
        return min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(num_competing / rate_per_second)))

    def _check_bounds(self, num_prompt_tokens: int, now_ns: int, applicant: Applicant, num_requests: int) -> None:
        """The bounds that hold whatever is forecast."""
        limits, service_class = self._limits, applicant.service_class
        if self._num_in_flight + num_requests > limits.max_in_flight:
            raise self.refusal("Too many requests are in flight.", now_ns)
        if self._outlook.num_tokens and self._outlook.num_tokens + num_prompt_tokens > limits.max_queued_prompt_tokens:
            raise self.refusal("Too many prompt tokens are waiting.", now_ns)
        num_queued, num_tokens = self._class_queues.get(service_class.name, (0, 0))
        has_places = self._num_in_flight + num_requests <= limits.max_num_seqs
        if num_queued + num_requests > service_class.max_queued_requests and not has_places:
            raise self.refusal(
                f"Too many requests of class {service_class.name} are waiting.", now_ns, RejectReason.CLASS_QUEUE_FULL
            )
        if num_queued and num_tokens + num_prompt_tokens > service_class.max_queued_tokens:
            raise self.refusal(
                f"Too many prompt tokens of class {service_class.name} are waiting.", now_ns, RejectReason.CLASS_QUEUE_FULL
            )

    def _check_forecast(self, ask: "_Ask") -> None:
        """Refuse who would not meet its target, with the time at which it would.

        Nobody is refused who can begin at once: no place is kept empty for callers who were told to come.
        """
        now_ns, applicant, level = ask.now_ns, ask.applicant, ask.applicant.service_class.level
        if self._outlook.can_begin_at_once(level, ask.num_requests):
            return
        queued = self._outlook.tokens_by_tenant(level)
        allowed_ns = self._outlook.allowed_ns(ask.num_prompt_tokens, now_ns, applicant)
        if ask.comes_as_told:
            others = queued  # its place was kept for it
        else:
            allowed_ns = round(NEWCOMER_SHARE * allowed_ns)
            others = _sum(queued, self._promised(ask, now_ns + allowed_ns))
        wait_ns = self._wait_ns(others, ask)
        if wait_ns is None or wait_ns <= allowed_ns:
            return
        last_wait_ns = self._wait_ns(_sum(queued, self._promised(ask)), ask) or wait_ns
        # Judged without its tenant's own queue: when that would let it in, its own share is the reason.
        without_own = {name: tokens for name, tokens in others.items() if name != applicant.tenant}
        wait_without_own_ns = self._wait_ns(without_own, ask)
        is_own_fault = self._has_tenants and wait_without_own_ns is not None and wait_without_own_ns <= allowed_ns
        is_own_fault = is_own_fault and bool(without_own)  # alone on the server, the server is the reason
        seconds = self._promise(ask, now_ns + max(round(last_wait_ns * PROMISE_CAUTION) - allowed_ns, 0))
        raise _over_share(applicant, seconds) if is_own_fault else _too_late(applicant, seconds)

    def _promise(self, ask: "_Ask", due_ns: int) -> int:
        """Keep a place, and count the refusal; the seconds after which to come.

        Who asks before its time keeps the place it has, if that is not the later one: else it would recede before those who ask
        often, and one caller could push away another who sends the same request.
        """
        now_ns, applicant, held = ask.now_ns, ask.applicant, ask.held
        self._refusals.count(now_ns)
        seconds = min(MAX_FORECAST_RETRY_SECONDS, _whole_seconds(due_ns - now_ns))
        due_ns = now_ns + seconds * _NS_PER_SECOND
        if held is not None and held.due_ns <= due_ns:
            return _whole_seconds(held.due_ns - now_ns)
        level, tenant = applicant.service_class.level, applicant.tenant
        self._promises.give(Promise(applicant.digest, due_ns, expiry_of(due_ns, now_ns), ask.num_prompt_tokens, level, tenant))
        return seconds

    def _shed(self, ask: "_Ask") -> None:
        """Turn away work of the lowest class by chance, the more likely the nearer the others are to their targets.

        Not who comes as told: it would come and go for as long as the others are near their targets. So that those who were
        turned away do not come back together, each is told a time behind the others.
        """
        now_ns, service_class = ask.now_ns, ask.applicant.service_class
        if ask.comes_as_told or self._shed_level is None or service_class.level < self._shed_level:
            return
        saturation = max((self._saturation(entry, now_ns) for entry in self._guarded), default=0.0)
        probability = min(1.0, max(0.0, (saturation - SHED_FROM) / (1 - SHED_FROM))) ** 2
        if not probability or self._draw() >= probability:
            return
        pause_ns = round(min(30.0, 2.0 * saturation) * _NS_PER_SECOND)
        seconds = self._promise(ask, now_ns + max(pause_ns, self._wait_ns(self._promised(ask), ask) or 0))
        raise RequestError(
            f"Work of class {service_class.name!r} is turned away while requests before it are near their targets. "
            f"Come again in {seconds} s.",
            code=ErrorCode.OVERLOADED,
            retry_after_seconds=seconds,
            reject_reason=RejectReason.SHED,
        )

    def _saturation(self, entry: ServiceClass, now_ns: int) -> float:
        """How near a short prompt behind all that waits of this class would be to a refusal: 1 is at it."""
        applicant = Applicant(entry)
        num_tokens = sum(self._outlook.tokens_by_tenant(entry.level).values())
        wait_ns = self._outlook.wait_ns({applicant.tenant: num_tokens}, 1, now_ns, applicant)
        return 0.0 if wait_ns is None else wait_ns / (NEWCOMER_SHARE * self._outlook.allowed_ns(1, now_ns, applicant))

    def _wait_ns(self, queued: Mapping[str, float], ask: "_Ask") -> int | None:
        return self._outlook.wait_ns(queued, ask.num_prompt_tokens, ask.now_ns, ask.applicant, ask.num_requests)

    def _promised(self, ask: "_Ask", until_ns: int | None = None) -> dict[str, float]:
        """Tokens of those who were told to come (by `until_ns`), by tenant; the applicant's own place left out."""
        expected = self._promises.tokens_by_tenant(ask.applicant.service_class.level, until_ns)
        if ask.held is not None and ask.held.tenant in expected:
            own = ask.held.num_tokens * self._promises.kept_ratio
            expected[ask.held.tenant] = max(0.0, expected[ask.held.tenant] - own)
        return expected

    def _count_class(self, applicant: Applicant, num_requests: int, num_tokens: int) -> None:
        counts = self._class_queues.setdefault(applicant.service_class.name, [0, 0])
        counts[0] += num_requests
        counts[1] += num_tokens

    def _begin_running(self, permit: Permit, now_ns: int) -> None:
        self._count_class(permit.applicant, -1, -permit.num_tokens)
        self._outlook.run(permit, now_ns)

    def _forget(self, permit: Permit, now_ns: int, *, was_queued: bool, completed: bool) -> None:
        self._num_in_flight -= 1
        if was_queued:
            self._count_class(permit.applicant, -1, -permit.num_tokens)
        self._outlook.end(permit, now_ns, was_queued=was_queued)
        if completed:
            self._completions.count(now_ns)


@dataclass(frozen=True, slots=True)
class _Ask:
    """A call before the door. `held`: the place that is kept for it, for later than now."""

    num_prompt_tokens: int
    now_ns: int
    applicant: Applicant
    num_requests: int
    held: Promise | None
    comes_as_told: bool  # its time had come, and it has taken up its place


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {*one, *other}}


def _whole_seconds(duration_ns: int) -> int:
    return max(1, math.ceil(duration_ns / _NS_PER_SECOND))


def _over_share(applicant: Applicant, seconds: int) -> RequestError:
    return RequestError(
        f"The requests of tenant {applicant.tenant!r} that wait already use its share, so that this one's first token would "
        f"come too late. Come again in {seconds} s.",
        code=ErrorCode.TENANT_OVER_SHARE,
        retry_after_seconds=seconds,
        reject_reason=RejectReason.TENANT_SHARE,
    )


def _too_late(applicant: Applicant, seconds: int) -> RequestError:
    service_class = applicant.service_class
    is_own_timeout = 0 < applicant.timeout_ns < service_class.ttft_target_ns
    who_allows = "its timeout" if is_own_timeout else f"class {service_class.name!r}"
    return RequestError(
        f"The first token would come later than {who_allows} allows. Come again in {seconds} s.",
        code=ErrorCode.OVERLOADED,
        retry_after_seconds=seconds,
        reject_reason=RejectReason.PREDICTED_TTFT,
    )
