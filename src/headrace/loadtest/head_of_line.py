"""Signs of head-of-line blocking, seen from outside: what waits behind a long prompt, what stands still while it is computed.

Owns: the three signs and what follows from them together. Runs in: load tool. Must not know: how verdicts are shown.
Prompt lengths are the server's usage, or what was meant where there is none.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.loadtest.prefill_stalls import find_prefill_stalls
from headrace.loadtest.records import RequestRecord, Run
from headrace.loadtest.statistics import regress
from headrace.loadtest.verdicts import Finding, long_prompt_tokens, milliseconds, num_prompt_tokens

Floats = npt.NDArray[np.float64]

MIN_REGRESSION_REQUESTS = 30
MIN_WAITING_SHARE = 0.20  # of mean TTFT, explained by prompt tokens ahead
MIN_QUEUE_R_SQUARED = 0.10

MIN_SHORT_REQUESTS = 30
MIN_LONG_REQUESTS = 10
MAX_SHORT_SHARE = 1 / 3  # of what counts as long: prompts up to this are short
MIN_TAIL_RATIO = 3.0  # p99/p50 of short prompts
MIN_TAIL_EXCESS = 2.0  # that ratio over the long prompts': queueing for anything else raises both
MIN_LONG_WAIT_SHARE = 0.5  # short prompts' p99 over long prompts' p50: they wait as long as long ones take
_NUM_TAIL_RESAMPLES = 500
_MAX_DECILES = 10
_MIN_PER_DECILE = 20


class BlockingVerdict(msgspec.Struct, kw_only=True, frozen=True):
    """The three signs of one run, and what they say together.

    `stops_streams`: running streams fall silent while another request's prompt is computed. `delays_waiting`: requests with
    short prompts wait behind long prompts. `found` is either. `is_judged`: at least one of the two could be told.
    """

    found: bool
    is_judged: bool
    stops_streams: bool
    delays_waiting: bool
    signs: tuple[Finding, ...]  # prefill stalls, TTFT behind the queue, tails of short prompts
    sentence: str


def find_head_of_line(run: Run) -> BlockingVerdict:
    """Look for all three signs. Waiting counts as blocked only when both of its signs agree: each alone has other causes."""
    stalls, behind, tails = find_prefill_stalls(run), find_ttft_behind_queue(run), find_short_prompt_tails(run)
    delays_waiting = behind.found and tails.found
    is_judged = stalls.is_judged or (behind.is_judged and tails.is_judged)
    parts = [stalls.sentence, behind.sentence, tails.sentence]
    if stalls.found and delays_waiting:
        head = "Head-of-line blocking, of running streams and of waiting requests."
    elif stalls.found:
        head = "Head-of-line blocking of running streams: they stand still while another prompt is computed."
    elif delays_waiting:
        head = "Head-of-line blocking of waiting requests: short prompts wait behind long ones."
    elif is_judged:
        head = "No head-of-line blocking seen."
    else:
        head = "Head-of-line blocking cannot be told from this run."
    return BlockingVerdict(
        found=stalls.found or delays_waiting,
        is_judged=is_judged,
        stops_streams=stalls.found,
        delays_waiting=delays_waiting,
        signs=(stalls, behind, tails),
        sentence=" ".join([head, *parts]),
    )


def find_ttft_behind_queue(run: Run) -> Finding:
    """TTFT regressed on the prompt tokens queued ahead: of requests sent before that had no text yet. Own length is controlled.

    Found when the slope's 95 % interval is above zero, waiting for those tokens explains a fifth of mean TTFT, and a tenth of
    its variance.
    """
    name = "ttft-behind-queue"
    records = _measured_streams(run)
    if len(records) < MIN_REGRESSION_REQUESTS:
        return Finding.not_judged(
            name,
            f"TTFT against tokens queued ahead takes {MIN_REGRESSION_REQUESTS} streams with known prompts, not {len(records)}.",
        )
    ttft = np.array([record.chunk_times[0] - record.sent for record in records])
    own = np.array([num_prompt_tokens(record) for record in records], dtype=np.float64)
    ahead = tokens_ahead(run.requests, [record.sent for record in records], run.wall_seconds)
    line = regress(ahead, ttft, own)
    if line is None:
        return Finding.not_judged(name, "Tokens queued ahead did not vary: TTFT cannot be regressed on them.")
    waiting_share = line.slope * float(ahead.mean()) / float(ttft.mean()) if ttft.mean() > 0 else 0.0
    evidence = {
        "seconds_per_thousand_tokens": line.slope * 1000,
        "seconds_per_thousand_tokens_low": line.slope_low * 1000,
        "seconds_per_thousand_tokens_high": line.slope_high * 1000,
        "r_squared": line.r_squared,
        "mean_tokens_ahead": float(ahead.mean()),
        "waiting_share_of_ttft": waiting_share,
        "num_requests": float(len(records)),
    }
    found = line.slope_low > 0.0 and waiting_share >= MIN_WAITING_SHARE and line.r_squared >= MIN_QUEUE_R_SQUARED
    cost = f"{milliseconds(line.slope * 1000)} for each 1000 prompt tokens queued ahead"
    sentence = (
        f"TTFT grows by {cost} ({waiting_share:.0%} of the mean TTFT)."
        if found
        else f"TTFT hardly depends on prompt tokens queued ahead ({waiting_share:.0%} of its mean; r2 {line.r_squared:.2f})."
    )
    return Finding(name=name, found=found, is_judged=True, evidence=evidence, sentence=sentence)


def tokens_ahead(records: Sequence[RequestRecord], moments: Sequence[float], run_end: float) -> Floats:
    """Prompt tokens, at each moment, of requests sent strictly before it that had neither text nor an end by then."""
    known = [(record, tokens) for record in records if (tokens := num_prompt_tokens(record)) is not None]
    sizes = np.array([tokens for _, tokens in known], dtype=np.float64)
    sent = np.array([record.sent for record, _ in known])
    served = np.array([_first_or_end(record, run_end) for record, _ in known])
    at = np.asarray(moments, dtype=np.float64)
    waiting: Floats = np.maximum(_total_before(sent, sizes, at) - _total_before(served, sizes, at), 0.0)
    return waiting


def _first_or_end(record: RequestRecord, run_end: float) -> float:
    if record.chunk_times:
        return record.chunk_times[0]
    return record.ended if record.ended is not None else run_end


def _total_before(times: Floats, sizes: Floats, at: Floats) -> Floats:
    """Sum of the sizes whose time is before each moment."""
    order = np.argsort(times)
    totals = np.concatenate([[0.0], np.cumsum(sizes[order])])
    found: Floats = totals[np.searchsorted(times[order], at, side="left")]
    return found


def find_short_prompt_tails(run: Run) -> Finding:
    """p99/p50 of TTFT by prompt length: blocked short prompts have a tail as long as long prompts' own time.

    Found when short prompts' p99/p50 is at least 3, at least twice that of long prompts (with the bootstrap interval of that
    excess above 1), and their p99 reaches half the long prompts' median. Evidence has the ratio by decile of prompt length.
    """
    name = "short-prompt-tails"
    records = sorted(_measured_streams(run), key=lambda record: (num_prompt_tokens(record) or 0, record.index))
    ttft = np.array([record.chunk_times[0] - record.sent for record in records])
    lengths = np.array([num_prompt_tokens(record) for record in records], dtype=np.float64)
    long_from = long_prompt_tokens(lengths)
    short, long = ttft[lengths <= MAX_SHORT_SHARE * long_from], ttft[lengths >= long_from]
    evidence = {"num_short": float(len(short)), "num_long": float(len(long)), "long_from_tokens": long_from}
    if len(short) < MIN_SHORT_REQUESTS or len(long) < MIN_LONG_REQUESTS:
        why = (
            f"{len(short)} short and {len(long)} long prompts ({long_from:.0f} tokens or more) are too few or too alike to "
            f"compare their tails: it takes {MIN_SHORT_REQUESTS} and {MIN_LONG_REQUESTS}."
        )
        return Finding.not_judged(name, why, evidence)
    short_ratio, long_ratio = _tail_ratio(short), _tail_ratio(long)
    excess = short_ratio / long_ratio
    excess_low = _excess_low(short, long, run.settings.seed)
    reach = float(np.quantile(short, 0.99) / max(np.median(long), 1e-9))
    evidence |= {
        "short_p99_over_p50": short_ratio,
        "long_p99_over_p50": long_ratio,
        "excess": excess,
        "excess_low": excess_low,
        "short_p99_over_long_p50": reach,
        **_ratios_by_decile(ttft),
    }
    found = short_ratio >= MIN_TAIL_RATIO and excess >= MIN_TAIL_EXCESS and excess_low > 1.0 and reach >= MIN_LONG_WAIT_SHARE
    figures = f"TTFT p99/p50 is {short_ratio:.1f} for short prompts and {long_ratio:.1f} for long ones"
    sentence = f"{figures}: short ones wait for long ones." if found else f"{figures}: no tail that is short prompts' alone."
    return Finding(name=name, found=found, is_judged=True, evidence=evidence, sentence=sentence)


def _tail_ratio(ttft: Floats) -> float:
    middle, tail = np.quantile(ttft, [0.5, 0.99])
    return float(tail / max(middle, 1e-9))


def _excess_low(short: Floats, long: Floats, seed: int) -> float:
    """Lower end of the 95 % bootstrap interval of (short p99/p50) / (long p99/p50).

    Both groups are drawn to the size of the smaller one: the p99 of few values is near their maximum, and so lower than that of
    many, which alone would be an excess.
    """
    generator = np.random.default_rng([seed, 2])
    size = min(len(short), len(long))
    ratios = []
    for group in (short, long):
        drawn = group[generator.integers(0, len(group), size=(_NUM_TAIL_RESAMPLES, size))]
        middle, tail = np.quantile(drawn, [0.5, 0.99], axis=1)
        ratios.append(tail / np.maximum(middle, 1e-9))
    return float(np.quantile(ratios[0] / ratios[1], 0.025))


def _ratios_by_decile(ttft_by_length: Floats) -> dict[str, float]:
    """p99/p50 for each tenth of the requests by prompt length; fewer and larger parts when tenths would be too small."""
    num_parts = max(3, min(_MAX_DECILES, len(ttft_by_length) // _MIN_PER_DECILE))
    parts = np.array_split(ttft_by_length, num_parts)
    return {f"p99_over_p50_part_{number}_of_{num_parts}": _tail_ratio(part) for number, part in enumerate(parts, start=1)}


def _measured_streams(run: Run) -> list[RequestRecord]:
    return [
        record
        for record in run.requests
        if record.is_stream
        and record.chunk_times
        and run.window_begin <= record.scheduled < run.window_end
        and num_prompt_tokens(record) is not None
    ]
