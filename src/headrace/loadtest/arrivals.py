"""When requests are due: arrival processes as absolute times, the same for the same seed.

Owns: due times. Runs in: load tool. Must not know: what is sent, the clock, processes.
Times are drawn, never rescaled: a Poisson run of n requests lasts about n / rate, not exactly, as its real counterpart would.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence

from headrace.loadtest.records import RunSettings

ARRIVALS = ("closed", "poisson", "bursty", "constant", "ramp", "trace")

# Names in RunSettings.extra, each with its meaning; values are numbers as text.
BURST_ON_SECONDS = "burst_on_seconds"  # mean length of an ON spell
BURST_OFF_SECONDS = "burst_off_seconds"  # mean length of an OFF spell
BURST_OFF_SHARE = "burst_off_share"  # rate in OFF spells as a share of the rate in ON spells, 0..1
RAMP_TO_RATE = "ramp_to_rate"  # rate at the ramp's end; it starts at settings.rate
RAMP_SECONDS = "ramp_seconds"  # how long the ramp is; default: the run's duration


def due_times(settings: RunSettings, trace_times: Sequence[float] | None = None) -> Iterator[float] | None:
    """Due times in seconds since the start, rising, limited by the settings' number of requests and duration.

    None for a closed loop. `trace_times`: for arrival "trace", in seconds on any clock; with `settings.rate` they are
    stretched to that mean rate, without it they are kept. ValueError, in words for the user, when something lacks or is wrong.
    """
    if settings.arrival not in ARRIVALS:
        raise ValueError(f"arrival is {settings.arrival!r}; it must be one of {', '.join(ARRIVALS)}")
    if settings.arrival == "closed":
        return None
    if settings.arrival == "trace":
        if trace_times is None:
            raise ValueError("arrival 'trace' needs the times of a trace")
        return limited(trace(trace_times, settings.rate), settings.num_requests, settings.duration_seconds)
    if settings.num_requests is None and settings.duration_seconds is None:
        raise ValueError("an open loop needs a number of requests or a duration")
    return limited(_drawn(settings), settings.num_requests, settings.duration_seconds)


def _drawn(settings: RunSettings) -> Iterator[float]:
    rate = settings.rate
    if rate is None:
        raise ValueError(f"arrival {settings.arrival!r} needs a rate (requests per second)")
    if settings.arrival == "constant":
        return constant(rate)
    if settings.arrival == "bursty":
        return bursty(
            rate,
            settings.seed,
            on_seconds=_number(settings, BURST_ON_SECONDS, 1.0),
            off_seconds=_number(settings, BURST_OFF_SECONDS, 4.0),
            off_share=_number(settings, BURST_OFF_SHARE, 0.0),
        )
    if settings.arrival == "ramp":
        over_seconds = _number(settings, RAMP_SECONDS, settings.duration_seconds)
        return ramp(rate, _number(settings, RAMP_TO_RATE, None), over_seconds, settings.seed)
    return poisson(rate, settings.seed)


def _number(settings: RunSettings, name: str, default: float | None) -> float:
    text = settings.extra.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"arrival {settings.arrival!r} needs {name}")
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a number") from None


def limited(times: Iterable[float], num_requests: int | None, duration_seconds: float | None) -> Iterator[float]:
    """The first `num_requests` times, as far as they lie before `duration_seconds`."""
    if duration_seconds is not None:
        end = duration_seconds
        times = itertools.takewhile(lambda due: due < end, times)
    return itertools.islice(times, num_requests)


def constant(rate: float) -> Iterator[float]:
    """One request each 1 / rate seconds, the first at 0."""
    _check_rate(rate)
    return (index / rate for index in itertools.count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Exponential gaps of mean 1 / rate, independent of one another: many users who do not know of each other."""
    _check_rate(rate)
    return (total / rate for total in itertools.accumulate(_exponentials(seed, "poisson")))


def bursty(rate: float, seed: int, *, on_seconds: float, off_seconds: float, off_share: float = 0.0) -> Iterator[float]:
    """A Poisson process whose rate switches between two states (MMPP-2: Fischer and Meier-Hellstern, 1993).

    Spells are exponential with means `on_seconds` and `off_seconds`; the rate in OFF spells is `off_share` times the rate in
    ON spells; the long-run mean rate is `rate`. The defaults in `due_times` put all arrivals into a fifth of the time, at five
    times the rate. It starts in a state drawn by the share of time spent in it.
    """
    _check_rate(rate)
    if not (0 < on_seconds < math.inf and 0 < off_seconds < math.inf and 0 <= off_share <= 1):
        raise ValueError("bursts need positive mean spells in seconds, and an OFF share between 0 and 1")
    on_rate = rate * (on_seconds + off_seconds) / (on_seconds + off_share * off_seconds)
    return _switching(on_rate, on_rate * off_share, on_seconds, off_seconds, seed)


def _switching(on_rate: float, off_rate: float, on_seconds: float, off_seconds: float, seed: int) -> Iterator[float]:
    work = _exponentials(seed, "bursty")  # gaps in units of expected arrivals, spent at the rate of the moment
    spells = _exponentials(seed, "spells")
    is_on = random.Random(f"{seed}:state").random() < on_seconds / (on_seconds + off_seconds)  # noqa: S311 - not for secrets
    now = 0.0
    spell_end = next(spells) * (on_seconds if is_on else off_seconds)
    gap = next(work)
    while True:
        rate = on_rate if is_on else off_rate
        if gap < rate * (spell_end - now):
            now += gap / rate
            yield now
            gap = next(work)
        else:
            gap -= rate * (spell_end - now)
            now = spell_end
            is_on = not is_on
            spell_end = now + next(spells) * (on_seconds if is_on else off_seconds)


def ramp(first_rate: float, last_rate: float, over_seconds: float, seed: int) -> Iterator[float]:
    """A Poisson process whose rate goes in a straight line from `first_rate` to `last_rate`, and then stays there.

    Drawn by inversion of the expected count: first_rate * t + slope * t^2 / 2.
    """
    _check_rate(last_rate)
    if first_rate < 0 or not 0 < over_seconds < math.inf:
        raise ValueError("a ramp needs a first rate of at least 0 and a positive length in seconds")
    slope = (last_rate - first_rate) / over_seconds
    in_ramp = (first_rate + last_rate) / 2 * over_seconds  # expected arrivals

    def at(count: float) -> float:
        if count <= 0:
            return 0.0
        if count >= in_ramp:
            return over_seconds + (count - in_ramp) / last_rate
        root = math.sqrt(max(0.0, first_rate * first_rate + 2 * slope * count))
        return 2 * count / (first_rate + root)  # this form of the root is exact for a slope of 0 too

    return (at(total) for total in itertools.accumulate(_exponentials(seed, "ramp")))


def trace(times: Sequence[float], rate: float | None = None) -> Iterator[float]:
    """Recorded times, moved so that the first is 0, and stretched to a mean rate when one is given. ValueError if they fall."""
    if not times:
        return iter(())
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise ValueError("the times of a trace must not go back")
    first, span = times[0], times[-1] - times[0]
    factor = 1.0
    if rate is not None:
        _check_rate(rate)
        if span <= 0:
            raise ValueError("a trace whose requests all come at once cannot be stretched to a rate")
        factor = (len(times) - 1) / rate / span
    return ((time - first) * factor for time in times)


def _exponentials(seed: int, name: str) -> Iterator[float]:
    source = random.Random(f"{seed}:{name}")  # noqa: S311 - not for secrets; seeded by text, so the same on each machine
    while True:
        yield -math.log1p(-source.random())


def _check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"the rate is {rate}; it must be a positive number of requests per second")
