"""Percentiles, bootstrap intervals, paired ratios and regressions: the arithmetic under every figure and verdict.

Owns: how a percentile and a confidence interval are defined. Runs in: load tool. Must not know: requests, runs, reports.
All is deterministic: whatever draws at random takes a seed.
"""

import math
import statistics as standard
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.loadtest.results import Distribution

PERCENTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "p999": 0.999}
CONFIDENCE = 0.95
NUM_RESAMPLES = 1000
MIN_CLUSTERS = 10  # fewer independent requests than this say nothing about their own spread
_MAX_DRAWN_UNITS = 256  # more requests than this are drawn in equal random parties, which keeps the interval and saves time
_MAX_BINS = 4000  # a resample's percentile is read off this many ranks at most
_NORMAL_FROM_DEGREES = 400  # Student's t and the normal distribution agree to 0.3 % from here on

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class RatioEstimate(msgspec.Struct, kw_only=True, frozen=True):
    """variant / baseline over paired blocks: the geometric mean and its 95 % interval. 1.0 = no difference."""

    ratio: float
    low: float
    high: float
    num_pairs: int

    @property
    def excludes_one(self) -> bool:
        """Whether a difference may be claimed."""
        return self.low > 1.0 or self.high < 1.0


class Regression(msgspec.Struct, kw_only=True, frozen=True):
    """y = intercept + slope * x (+ a control): least squares, the slope with its 95 % t-interval."""

    slope: float
    slope_low: float
    slope_high: float
    intercept: float  # at x = 0 and the control's mean
    r_squared: float  # of x alone, after the control
    num_points: int


def percentile(values: Sequence[float] | Floats, share: float) -> float:
    """The value below which `share` (0..1) of the values lie, linear between the two nearest ranks: rank = share * (n - 1).

    It is Hyndman and Fan's definition 7 (The American Statistician, 1996), numpy's and spreadsheets' default. Raises ValueError
    without values.
    """
    if len(values) == 0:
        raise ValueError("no value, no percentile")
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def distribution(values: Sequence[float] | Floats, owners: Integers | None = None, *, seed: int = 0) -> Distribution:
    """Summary of `values` in seconds.

    `owners[i]` is the number (0 or more) of the request that value i belongs to; None: one value a request. Intervals come
    from `bootstrap_intervals`.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 0:
        return Distribution(count=0)
    points = np.quantile(array, list(PERCENTILES.values()))
    p50, p90, p99, p999 = (float(point) for point in points)
    return Distribution(
        count=len(array),
        mean=float(array.mean()),
        min=float(array.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        max=float(array.max()),
        ci95=bootstrap_intervals(array, owners, seed=seed),
    )


def bootstrap_intervals(
    values: Floats, owners: Integers | None = None, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> dict[str, tuple[float, float]]:
    """95 % percentile-bootstrap intervals of the mean and of PERCENTILES, by name. Empty with fewer than MIN_CLUSTERS owners.

    What is drawn with replacement is an owner with all its values (the cluster bootstrap: Davison and Hinkley, Bootstrap
    Methods, 1997, 3.8): the gaps of one request are not independent, and an interval over gaps would be far too narrow. More
    than _MAX_DRAWN_UNITS owners are first dealt into that many equal parties. A resample is then a vector of weights times a
    table of counts (party by rank), so that millions of gaps cost a fraction of a second.
    """
    party_of_value, num_parties = _parties(len(values), owners, seed)
    if num_parties < MIN_CLUSTERS:
        return {}
    order = np.argsort(values)
    edges = _edge_ranks(len(values))
    bin_of_rank = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=-1))
    cells = party_of_value[order] * len(edges) + bin_of_rank
    counts = np.bincount(cells, minlength=num_parties * len(edges)).reshape(num_parties, len(edges)).astype(np.float64)
    sums = np.bincount(party_of_value, weights=values, minlength=num_parties)
    weights = np.random.default_rng(seed).multinomial(num_parties, np.full(num_parties, 1 / num_parties), num_resamples)
    drawn = weights.astype(np.float64)
    cumulative = np.cumsum(drawn @ counts, axis=1)
    totals = cumulative[:, -1]
    intervals = {"mean": _interval((drawn @ sums) / totals)}
    edge_values = values[order][edges]
    for name, share in PERCENTILES.items():
        first_bin = (cumulative >= (share * totals)[:, None]).argmax(axis=1)
        intervals[name] = _interval(edge_values[first_bin])
    return intervals


def _parties(num_values: int, owners: Integers | None, seed: int) -> tuple[Integers, int]:
    """What each value is drawn with: (party of each value, number of parties)."""
    if owners is None:
        owner_of_value, num_owners = np.arange(num_values, dtype=np.int64), num_values
    else:
        place_of_owner = np.cumsum(np.bincount(owners) > 0) - 1
        owner_of_value, num_owners = place_of_owner[owners], int(place_of_owner[-1]) + 1
    if num_owners <= _MAX_DRAWN_UNITS:
        return owner_of_value, num_owners
    party_of_owner = np.random.default_rng([seed, 1]).permutation(num_owners) % _MAX_DRAWN_UNITS
    return party_of_owner[owner_of_value], _MAX_DRAWN_UNITS


def _edge_ranks(num_values: int) -> Integers:
    """Ranks a resampled percentile may fall on, ascending, the last rank included: all of them, or a grid dense in the tail."""
    if num_values <= _MAX_BINS:
        return np.arange(num_values, dtype=np.int64)
    body = np.linspace(0.0, 1.0, _MAX_BINS // 2)
    tail = 1.0 - np.geomspace(0.2, 0.5 / num_values, _MAX_BINS // 2)
    ranks = np.ceil(np.concatenate([body, tail]) * (num_values - 1)).astype(np.int64)
    return np.unique(np.append(ranks, num_values - 1))


def _interval(estimates: Floats) -> tuple[float, float]:
    low, high = np.quantile(estimates, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_ratio(baseline: Sequence[float], variant: Sequence[float], *, num_discarded: int = 0) -> RatioEstimate:
    """How many times the baseline the variant is, from blocks measured in alternation (ABBA): pair i is (baseline, variant).

    Drift that is slow against a block cancels within a pair. The interval is Student's t on the logarithms of the ratios (a
    percentile bootstrap of few pairs is too narrow). The first `num_discarded` pairs are left out as warm-up. Raises ValueError
    for unequal lengths, fewer than two pairs that remain, or a value that is not positive and finite.
    """
    if len(baseline) != len(variant):
        raise ValueError(f"pairs need equal lengths, not {len(baseline)} and {len(variant)}")
    pairs = list(zip(baseline, variant, strict=True))[num_discarded:]
    if len(pairs) < 2:
        raise ValueError(f"an interval needs two pairs at least, not {len(pairs)}")
    if not all(math.isfinite(value) and value > 0 for pair in pairs for value in pair):
        raise ValueError("ratios need positive, finite values")
    logs = [math.log(second / first) for first, second in pairs]
    middle = standard.fmean(logs)
    margin = student_t_quantile((1 + CONFIDENCE) / 2, len(logs) - 1) * standard.stdev(logs) / math.sqrt(len(logs))
    return RatioEstimate(
        ratio=math.exp(middle), low=math.exp(middle - margin), high=math.exp(middle + margin), num_pairs=len(logs)
    )


def regress(x: Sequence[float] | Floats, y: Sequence[float] | Floats, control: Floats | None = None) -> Regression | None:
    """Least squares of y on x, or on x and a control (partialled out of both, after Frisch, Waugh and Lovell).

    None when there are too few points for an interval, or x does not vary (beyond what the control explains).
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    degrees = len(xs) - 2
    x_mean, y_mean = _mean(xs), _mean(ys)
    x_rest, y_rest = xs - x_mean, ys - y_mean
    spread = float(x_rest @ x_rest)
    if control is not None and len(control) and float(np.ptp(control)) > 0.0:
        degrees -= 1
        around = control - control.mean()
        x_rest = x_rest - around * (around @ x_rest) / (around @ around)
        y_rest = y_rest - around * (around @ y_rest) / (around @ around)
    own_spread = float(x_rest @ x_rest)
    if degrees < 1 or spread <= 0.0 or own_spread <= 1e-9 * spread:
        return None
    slope = float(x_rest @ y_rest) / own_spread
    residuals = y_rest - slope * x_rest
    y_spread = float(y_rest @ y_rest)
    error = math.sqrt(float(residuals @ residuals) / degrees / own_spread)
    margin = student_t_quantile((1 + CONFIDENCE) / 2, degrees) * error
    return Regression(
        slope=slope,
        slope_low=slope - margin,
        slope_high=slope + margin,
        intercept=y_mean - slope * x_mean,
        r_squared=1.0 - float(residuals @ residuals) / y_spread if y_spread > 0.0 else 0.0,
        num_points=len(xs),
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def student_t_quantile(share: float, degrees: int) -> float:
    """What Student's t with `degrees` of freedom stays below with probability `share`. Raises ValueError outside 0..1."""
    if not 0.0 < share < 1.0 or degrees < 1:
        raise ValueError(f"no quantile of t at {share} with {degrees} degrees of freedom")
    if degrees >= _NORMAL_FROM_DEGREES:
        return standard.NormalDist().inv_cdf(share)
    if share < 0.5:
        return -student_t_quantile(1.0 - share, degrees)
    low, high = 0.0, math.pi / 2  # bisection over the angle: finite for any tail
    for _ in range(80):
        middle = (low + high) / 2
        if _student_t_cdf(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student_t_cdf(angle: float, degrees: int) -> float:
    """P(t < sqrt(degrees) * tan(angle)), angle >= 0: the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun."""
    cosine, sine = math.cos(angle), math.sin(angle)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for factor in range(3, degrees - 1, 2):
            term *= cosine * cosine * (factor - 1) / factor
            total += term
        both_sides = (angle + sine * total) * 2 / math.pi
    else:
        term, total = 1.0, 1.0
        for factor in range(2, degrees - 1, 2):
            term *= cosine * cosine * (factor - 1) / factor
            total += term
        both_sides = sine * total
    return 0.5 + both_sides / 2
