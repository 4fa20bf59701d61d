"""Which token a uniform number falls on, when only the best candidates and bounds on the rest are known.

Owns: the arithmetic of temperature, min_p, top_k, top_p and the inverse CDF. Runs in: worker. Must not know: requests, graphs.

`draw` works on the candidates of many rows, `draw_from_all` on all logits of one.

Tokens are ordered by descending logit, ties by ascending id; the draw u falls on the first token at which the cumulated mass
exceeds u times the mass that min_p, top_k and top_p leave, in that order (the order of vLLM's sampler; min_p and top_k cut a
beginning of the same list, so that only top_p, which counts the mass that they left, depends on it). All masses here are
relative to that of the best token: exp((logit - best) / temperature).

Candidates are a beginning of that order. The mass of the others need not be known exactly: with a lower and an upper bound
on it, both the least and the greatest place where u could fall are found, and where the two agree, the token is certain. So a
list of 64 candidates serves most draws from 50,000 tokens, with the same outcome as the whole list.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
MIN_TEMPERATURE = 1e-6  # below it only ties with the best token have any mass, and divisions would overflow
TOLERANCE = 1e-4  # relative error of any mass; float32 logits summed by whatever device are better than that by far
MAX_SORTED = 1024  # how many tokens are sorted without a thought
SAMPLE_SIZE = 256  # of the values from which a pivot is taken


@dataclass(frozen=True, slots=True)
class Draws:
    """What N rows ask for, as arrays of shape [N]."""

    temperature: FloatArray  # > 0
    top_p: FloatArray
    top_k: IntArray  # 0: all
    min_p: FloatArray
    uniform: FloatArray  # in [0, 1)


def tail_bounds(
    log_values: FloatArray, log_normalizer: FloatArray, temperature: FloatArray, num_tail_tokens: int
) -> tuple[FloatArray, FloatArray]:
    """Lower and upper bound on the tempered mass of the tokens beyond the candidates; all arrays relative to the best token.

    `log_values` [N, M]: candidates' logits minus the best one. `log_normalizer` [N]: log of the sum of exp over all tokens, at
    temperature 1, minus the best logit, within TOLERANCE. Returns two arrays [N].

    With x_i = exp(l_i) for the n tail tokens, R their known sum, c the last candidate's mass (so x_i <= c) and p = 1 / T,
    the sum of x_i**p lies between n * (R / n)**p (Jensen) and R * c**(p - 1); for p < 1 the two change places.
    """
    whole = np.exp(log_normalizer)
    slack = TOLERANCE * whole
    rest = whole - np.exp(log_values).sum(axis=1)
    if num_tail_tokens == 0:
        zeros = np.zeros_like(rest)
        return zeros, zeros
    low, high = np.maximum(rest - slack, 0.0), np.maximum(rest, 0.0) + slack
    power = 1.0 / np.maximum(temperature, MIN_TEMPERATURE)
    log_last = log_values[:, -1]
    highest = np.log(float(num_tail_tokens)) + power * log_last  # every tail token as good as the last candidate
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_low, log_high = np.log(low), np.log(high)
        log_tokens = np.log(float(num_tail_tokens))
        even_low, even_high = (log_tokens + power * (bound - log_tokens) for bound in (log_low, log_high))
        heaped_low, heaped_high = (bound + (power - 1.0) * log_last for bound in (log_low, log_high))
        cold = power >= 1.0
        lowest = np.where(cold, even_low, heaped_low)
        highest = np.minimum(np.where(cold, heaped_high, even_high), highest)
        least, most = np.exp(lowest), np.exp(highest)
    # A last candidate of no mass at all (logit -inf) leaves a tail of none; the powers above are not defined then.
    return np.nan_to_num(np.minimum(least, most), nan=0.0), np.nan_to_num(most, nan=0.0)


def draw(log_values: FloatArray, draws: Draws, tail_low: FloatArray, tail_high: FloatArray, *, complete: bool) -> IntArray:
    """Index into its candidates for each row [N], or -1 where the candidates and bounds do not decide.

    `log_values` [N, M], descending, 0 first: logits minus the best. `tail_low`, `tail_high` [N]: bounds on the tempered mass of
    the tokens that are not candidates. `complete`: there are none. A draw closer to the border between two tokens than
    TOLERANCE is not decided either, so that rounding never makes this and draw_from_all differ.
    """
    num_rows, num_candidates = log_values.shape
    temperature = np.maximum(draws.temperature, MIN_TEMPERATURE)[:, None]
    cumulated = np.cumsum(np.exp(log_values / temperature), axis=1)
    cut, exact = _cut(log_values, temperature, draws, complete)
    row_indices = np.arange(num_rows)
    inside = cumulated[row_indices, cut - 1]
    trimmed = (draws.top_k > 0) | (draws.min_p > 0.0)  # these may leave less of the tail than there is, down to nothing
    low = np.where(exact | trimmed, inside, inside + tail_low)
    high = np.where(exact, inside, inside + tail_high)
    low, high = low * (1.0 - TOLERANCE), high * (1.0 + TOLERANCE)

    last_low = last_high = np.where(exact, cut, num_candidates + 1) - 1  # the last token that may be drawn; M: a tail token
    with_top_p = draws.top_p < 1.0
    if with_top_p.any():
        nucleus_low = np.minimum(_count_below(cumulated, draws.top_p * low, inclusive=False), last_low)
        nucleus_high = np.minimum(_count_below(cumulated, draws.top_p * high, inclusive=False), last_high)
        # One that ends at a candidate has the mass cumulated there; one that ends beyond has more than all candidates.
        ends_low, ends_high = nucleus_low < num_candidates, nucleus_high < num_candidates
        mass_low = np.where(ends_low, cumulated[row_indices, np.minimum(nucleus_low, num_candidates - 1)], draws.top_p * low)
        mass_high = np.where(ends_high, cumulated[row_indices, np.minimum(nucleus_high, num_candidates - 1)], high)
        low = np.where(with_top_p, mass_low * (1.0 - TOLERANCE), low)
        high = np.where(with_top_p, mass_high * (1.0 + TOLERANCE), high)
        last_low = np.where(with_top_p, nucleus_low, last_low)
        last_high = np.where(with_top_p, nucleus_high, last_high)

    first = np.minimum(_count_below(cumulated, draws.uniform * low, inclusive=True), last_low)
    last = np.minimum(_count_below(cumulated, draws.uniform * high, inclusive=True), last_high)
    return np.where((first == last) & (last < num_candidates), last, -1)


def _cut(
    log_values: FloatArray, temperature: FloatArray, draws: Draws, complete: bool
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """How many candidates min_p and top_k leave [N] (at least one), and whether they leave no token beyond them."""
    num_rows, num_candidates = log_values.shape
    cut = np.full(num_rows, num_candidates)
    exact = np.full(num_rows, complete)
    if draws.min_p.any():
        with np.errstate(divide="ignore"):
            least = temperature[:, 0] * np.log(draws.min_p)  # compared as logits: the same test whatever else is computed
        cut = np.count_nonzero(log_values >= least[:, None], axis=1)
        exact = exact | (cut < num_candidates)
    if draws.top_k.any():
        limited = (draws.top_k > 0) & (draws.top_k <= num_candidates)
        cut = np.where(limited, np.minimum(cut, draws.top_k), cut)
        exact = exact | limited
    return np.maximum(cut, 1), exact


def _count_below(cumulated: FloatArray, limits: FloatArray, *, inclusive: bool) -> IntArray:
    """How many cumulated masses [N, M] lie below their row's limit [N]: the index of the first that does not."""
    below = cumulated <= limits[:, None] if inclusive else cumulated < limits[:, None]
    counts: IntArray = np.count_nonzero(below, axis=1)
    return counts


def draw_from_all(logits: Float32Array, draws: Draws, index: int = 0) -> int:
    """The token that the draw of row `index` falls on, from all its logits [V], the best of which is finite."""
    best = logits.max()
    temperature = max(float(draws.temperature[index]), MIN_TEMPERATURE)
    values, ids = logits, None  # None: all
    if draws.min_p[index] > 0.0:
        least = temperature * float(np.log(draws.min_p[index]))
        ids = np.flatnonzero(logits >= best + np.float32(least - 1e-3))  # nearly; then the very test that _cut makes
        ids = ids[logits[ids].astype(np.float64) - float(best) >= least]
        values = logits[ids]
    top_k = int(draws.top_k[index])
    if 0 < top_k < len(values):
        values, ids = _select(values, ids, _best_places(values, top_k))
    with np.errstate(over="ignore"):  # a tiny temperature may send a logit to -inf: no mass
        masses = np.exp((values - best) / np.float32(temperature))
    if masses.min() == 0.0:  # what has no mass must not be reached by rounding either
        with_mass = np.flatnonzero(masses)
        masses = masses[with_mass]
        values, ids = _select(values, ids, with_mass)
    mass = float(masses.sum(dtype=np.float64))
    if draws.top_p[index] < 1.0:
        mass = _locate(values, masses, float(draws.top_p[index]) * mass, inclusive=False)[1]
    place, _ = _locate(values, masses, float(draws.uniform[index]) * mass, inclusive=True)
    return place if ids is None else int(ids[place])


def _select(values: Float32Array, ids: IntArray | None, places: IntArray) -> tuple[Float32Array, IntArray]:
    return values[places], places if ids is None else ids[places]


def _best_places(values: Float32Array, wanted: int) -> IntArray:
    """The first `wanted` places in order of descending value; returned ascending. A sample tells which are worth sorting."""
    places: IntArray | None = None
    if len(values) > MAX_SORTED:
        stride = len(values) // SAMPLE_SIZE
        sample = np.sort(values[::stride])
        pivot = sample[max(0, len(sample) - 4 - 2 * wanted // stride)]
        places = np.flatnonzero(values >= pivot)
        if len(places) < wanted:
            places = None
    order = np.argsort(-(values if places is None else values[places]), kind="stable")[:wanted]
    return np.sort(order if places is None else places[order])


def _locate(values: Float32Array, masses: Float32Array, target: float, *, inclusive: bool) -> tuple[int, float]:
    """Where in descending order of value the cumulated mass first exceeds `target` (inclusive) or reaches it (not).

    Returns the place in `values` and the cumulated mass there. Equal values: the lower place is first. Selection by mass (as
    quickselect does by rank): the part that cannot hold the place is dropped, and only a small rest is sorted.
    """
    places: IntArray | None = None  # None: all
    before = 0.0
    share = 16  # one in so many goes above the pivot: few at first, because most of the mass is in few tokens
    while len(values) > MAX_SORTED:
        sample = np.sort(values[:: len(values) // SAMPLE_SIZE])
        above = values >= sample[-max(1, len(sample) // share)]
        upper = np.flatnonzero(above)
        if len(upper) == len(values):
            break  # a great many equals
        mass_above = float(masses[upper].sum(dtype=np.float64))
        if before + mass_above > target:
            kept = upper
        else:
            kept = np.flatnonzero(~above)
            before += mass_above
            share = 2
        masses = masses[kept]
        values, places = _select(values, places, kept)
    order = np.argsort(-values, kind="stable")
    cumulated = before + np.cumsum(masses[order], dtype=np.float64)
    place = int(np.searchsorted(cumulated, target, side="right" if inclusive else "left"))
    place = min(place, len(order) - 1)  # rounding
    found = int(order[place])
    return (found if places is None else int(places[found])), float(cumulated[place])
