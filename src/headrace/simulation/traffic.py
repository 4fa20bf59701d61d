"""Synthetic traffic: when requests come, how long they are, what they share, whose they are.

Owns: draw_traffic, the requests of each workload. Runs in: simulator. Must not know: policies, figures, files.
Everything is drawn from the seed. Shapes and arrival processes are those of the load tool.
"""

import heapq
import itertools
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace.loadtest.arrivals import bursty, constant, poisson
from headrace.loadtest.lengths import SHAPES, Lengths, QuantileTable, cut_to_context, draw_lengths
from headrace.loadtest.mixes import MixClass, parse_mix
from headrace.loadtest.request_drafts import WorkloadError
from headrace.loadtest.traces import MOONCAKE_PART_TOKENS
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import DEFAULT_TENANT, TrafficPolicy
from headrace.simulation.limits import MAX_REQUESTS, MAX_SPELLS, nanoseconds_due
from headrace.simulation.requests import SimulatedRequest
from headrace.simulation.settings import DEFAULT_REQUESTS, TrafficSettings

WORKLOADS: dict[str, str] = {
    "azure-conversation": "lengths of Azure's 2023 conversation trace",
    "azure-code": "lengths of Azure's 2023 code trace: long prompts, short answers",
    "mooncake-conversation": "lengths of Mooncake's conversation trace, prompts that begin as earlier ones did",
    "fixed:PROMPT,OUTPUT": "every prompt and answer of one length",
    "mix:CLASS=WEIGHT:WORKLOAD;...": "several of these; the names are those of service classes",
    "trace:FILE": "Azure's CSV, Mooncake's JSONL, a run saved by bench, a record of headrace serve --record",
}
_MOONCAKE = "mooncake-conversation"
# Share of a prompt that an earlier one began with, in Mooncake's conversation trace (FAST 2025): quartiles and 90th percentile
# measured with an unbounded cache.
_SHARED_SHARE = QuantileTable((0.0, 0.25, 0.5, 0.75, 0.9, 1.0), (0, 7, 36, 71, 95, 100))  # per cent
_REMEMBERED_PROMPTS = 512
_NUM_LOOKS = 16
_DRAWN_TENANT = "tenant-"
_DIGITS = re.compile("[0-9]{1,12}")


@dataclass(slots=True)
class Traffic:
    """Requests in order of time, and what was done to them, for people."""

    requests: list[SimulatedRequest]
    notes: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Mean requests per second, from the first to the last; 0 where all come at once."""
        span_ns = self.requests[-1].due_ns - self.requests[0].due_ns
        return (len(self.requests) - 1) / span_ns * 1e9 if span_ns else 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """A request before it has a time, a tenant and a number."""

    lengths: Lengths
    service_class: str = ""  # "": to be drawn
    part_tokens: int = 0
    parts: tuple[int, ...] = ()


def zipf_tenants(num_tenants: int) -> dict[str, float]:
    """tenant-1 .. tenant-N, the share of each falling as 1 / rank."""
    return {f"{_DRAWN_TENANT}{rank}": 1.0 / rank for rank in range(1, num_tenants + 1)}


def draw_traffic(settings: TrafficSettings, policy: TrafficPolicy, context_tokens: int, rate: float | None) -> Traffic:
    """The requests; `rate` None: all at time 0. Raises ConfigurationError."""
    num_requests = _num_requests(settings, rate)
    if rate is not None and settings.arrival == "bursty":
        _check_bursts(settings, rate, num_requests)
    drafts = _drafts(settings)
    classes = random.Random(f"{settings.seed}:classes")  # noqa: S311 - not for secrets
    names, shares = list(settings.classes), list(settings.classes.values())
    if any(draft_class not in policy.class_names for draft_class in _mix_names(settings)):
        raise ConfigurationError(f"the names of a mix must be those of classes: {', '.join(policy.class_names)}.")
    tenant_numbers = {name: place for place, name in enumerate(settings.tenants)}
    requests: list[SimulatedRequest] = []
    num_cut = 0
    for (at, tenant), draft in zip(_times(settings, rate, num_requests), drafts, strict=False):
        drawn = classes.choices(names, shares)[0] if names else policy.default_class
        lengths = cut_to_context(draft.lengths, context_tokens)
        num_cut += lengths != draft.lengths
        part_tokens, parts = draft.part_tokens, draft.parts
        if settings.shared_prefix_tokens:
            part_tokens, parts = settings.shared_prefix_tokens, (tenant_numbers.get(tenant, 0),)
        requests.append(
            SimulatedRequest(
                index=len(requests),
                due_ns=nanoseconds_due(at, len(requests) + 1, "", "give a higher rate or fewer requests"),
                prompt_tokens=lengths.prompt_tokens,
                output_tokens=lengths.output_tokens,
                max_tokens=asked_tokens(lengths, settings.max_tokens, context_tokens),
                service_class=draft.service_class or drawn,
                tenant_id=tenant,
                timeout_ns=round((settings.timeout_seconds or 0.0) * 1e9),
                part_tokens=part_tokens,
                parts=parts,
            )
        )
    if not requests:
        raise ConfigurationError("no request falls into the time that was asked for.")
    if len(requests) > MAX_REQUESTS:
        raise _too_many_requests(settings, rate)
    return Traffic(requests, cut_note(num_cut, len(requests), context_tokens))


def _num_requests(settings: TrafficSettings, rate: float | None) -> int:
    """Most that are drawn. One more than there may be, where only the duration bounds them: so too many are seen."""
    if settings.num_requests is not None:
        return settings.num_requests
    if settings.duration_seconds is None or rate is None:
        return DEFAULT_REQUESTS
    if settings.duration_seconds * rate > MAX_REQUESTS:
        raise _too_many_requests(settings, rate)
    return MAX_REQUESTS + 1


def _too_many_requests(settings: TrafficSettings, rate: float | None) -> ConfigurationError:
    return ConfigurationError(
        f"duration_seconds: {settings.duration_seconds:g} s at {rate or 0.0:.3g} requests/s are more than {MAX_REQUESTS} "
        "requests: give a shorter duration, a lower rate or load, or a number of requests."
    )


def _check_bursts(settings: TrafficSettings, rate: float, num_requests: int) -> None:
    """Bursts and pauses are drawn one by one, until the last request and until the rarest tenant's first."""
    shares = list(settings.tenants.values()) or [1.0]
    seconds = num_requests / rate
    if settings.duration_seconds is not None:
        seconds = min(seconds, settings.duration_seconds)
    seconds = max(seconds, sum(shares) / min(shares) / rate)
    num_spells = 2 * len(shares) * seconds / (settings.burst_on_seconds + settings.burst_off_seconds)
    if num_spells > MAX_SPELLS:
        raise ConfigurationError(
            f"burst_on_seconds, burst_off_seconds: some {num_spells:.3g} bursts and pauses would be drawn, and at most "
            f"{MAX_SPELLS} are: make them longer, the rate higher or requests fewer."
        )


def asked_tokens(lengths: Lengths, max_tokens: int | None, context_tokens: int) -> int:
    """What a request asks for: `max_tokens`, or the next power of two of its output, as far as the context allows."""
    asked = max_tokens if max_tokens is not None else 1 << (lengths.output_tokens - 1).bit_length()
    return max(lengths.output_tokens, min(asked, context_tokens - lengths.prompt_tokens))


def cut_note(num_cut: int, num_requests: int, context_tokens: int) -> list[str]:
    """For people, if there is something to say."""
    return [f"{num_cut} of {num_requests} requests were cut to the context of {context_tokens} tokens"] if num_cut else []


def _times(settings: TrafficSettings, rate: float | None, num_requests: int) -> Iterator[tuple[float, str]]:
    """(seconds, tenant) in order of time. Each tenant has an arrival process of its own."""
    tenants = settings.tenants or {DEFAULT_TENANT: 1.0}
    total = sum(tenants.values())
    if rate is None:
        source = random.Random(f"{settings.seed}:tenants")  # noqa: S311 - not for secrets
        drawn = source.choices(list(tenants), list(tenants.values()), k=num_requests)
        return ((0.0, tenant) for tenant in drawn)
    processes = [
        zip(_process(settings, rate * share / total, place), itertools.repeat(name))
        for place, (name, share) in enumerate(tenants.items())
    ]
    merged = heapq.merge(*processes)
    end = settings.duration_seconds
    kept = merged if end is None else itertools.takewhile(lambda item: item[0] < end, merged)
    return itertools.islice(kept, num_requests)


def _process(settings: TrafficSettings, rate: float, place: int) -> Iterator[float]:
    seed = settings.seed * 1000 + place
    if settings.arrival == "constant":
        return constant(rate)
    if settings.arrival == "bursty":
        return bursty(rate, seed, on_seconds=settings.burst_on_seconds, off_seconds=settings.burst_off_seconds)
    return poisson(rate, seed)


def _mix_names(settings: TrafficSettings) -> list[str]:
    kind, _, argument = settings.workload.partition(":")
    return [item.name for item in _mix(argument)] if kind == "mix" else []


def _drafts(settings: TrafficSettings) -> Iterator[Draft]:
    kind, _, argument = settings.workload.partition(":")
    if kind != "mix":
        if settings.shared_prefix_tokens and kind == _MOONCAKE:
            raise ConfigurationError(f"{_MOONCAKE} has shared prefixes of its own.")
        return _of_workload(settings.workload, settings.length_scale, f"{settings.seed}:lengths", itertools.count().__next__)
    if settings.classes:
        raise ConfigurationError("a mix names the classes itself: leave out --classes.")
    return _mixed(settings, _mix(argument))


def _mix(text: str) -> tuple[MixClass, ...]:
    try:
        return parse_mix(text)
    except WorkloadError as error:
        raise ConfigurationError(f"{error}.") from None


def _mixed(settings: TrafficSettings, classes: tuple[MixClass, ...]) -> Iterator[Draft]:
    """Each next request is of a class drawn by the weights."""
    new_part = itertools.count().__next__
    sources = [
        _of_workload(
            _with_lengths(item),
            settings.length_scale if item.length_scale is None else item.length_scale,
            f"{settings.seed}:{item.name}:lengths",
            new_part,
        )
        for item in classes
    ]
    choice = random.Random(f"{settings.seed}:mix")  # noqa: S311 - not for secrets
    weights = [item.weight for item in classes]
    while True:
        place = choice.choices(range(len(classes)), weights)[0]
        draft = next(sources[place])
        yield Draft(draft.lengths, classes[place].name, draft.part_tokens, draft.parts)


def _with_lengths(item: MixClass) -> str:
    """A mix from a file may give the lengths of `fixed` apart."""
    if item.workload == "fixed" and item.prompt_tokens and item.output_tokens:
        return f"fixed:{item.prompt_tokens},{item.output_tokens}"
    if item.prompt_tokens or item.output_tokens or item.extra:
        raise ConfigurationError(f"class {item.name!r}: the simulator knows no such options of workload {item.workload!r}.")
    return item.workload


def _of_workload(workload: str, scale: float, seed: str, new_part: Callable[[], int]) -> Iterator[Draft]:
    kind, _, argument = workload.partition(":")
    if kind == "fixed":
        prompt, _, output = argument.partition(",")
        if not all(_DIGITS.fullmatch(length.strip()) and int(length) for length in (prompt, output)):
            raise ConfigurationError(
                f"workload {workload[:80]!r}: behind the colon stand two lengths in tokens, such as 512,64, of at most 12 "
                "digits."
            )
        if scale != 1.0:
            raise ConfigurationError("workload fixed has no lengths to scale: give the lengths themselves.")
        return itertools.repeat(Draft(Lengths(int(prompt), int(output))))
    if kind not in SHAPES or argument:
        raise ConfigurationError(f"workload is {workload!r}; it must be one of {', '.join(WORKLOADS)}.")
    lengths = draw_lengths(SHAPES[kind], scale, seed)
    if kind == _MOONCAKE:
        return _sharing(lengths, max(1, round(MOONCAKE_PART_TOKENS * scale)), seed, new_part)
    return (Draft(item) for item in lengths)


def _sharing(lengths: Iterator[Lengths], part_tokens: int, seed: str, new_part: Callable[[], int]) -> Iterator[Draft]:
    """Each prompt begins with a drawn share of a recent one's parts, as the next turn of a conversation does."""
    source = random.Random(f"{seed}:prefixes")  # noqa: S311 - not for secrets
    recent: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED_PROMPTS)
    for item in lengths:
        num_parts = -(-item.prompt_tokens // part_tokens)
        wanted = round(_SHARED_SHARE.at(source.random()) / 100 * num_parts)
        shared: tuple[int, ...] = ()
        for _ in range(_NUM_LOOKS if wanted and recent else 0):
            shared = max(shared, source.choice(recent)[:wanted], key=len)
            if len(shared) == wanted:
                break
        parts = shared + tuple(new_part() for _ in range(num_parts - len(shared)))
        recent.append(parts)
        yield Draft(item, part_tokens=part_tokens, parts=parts)
