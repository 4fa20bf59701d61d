"""How many tokens each event with text brought: what `usage` says, laid over the events that were seen.

Owns: TokenCounts, the rules for merged events. Runs in: load tool. Must not know: percentiles, runs, reports.
"""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.loadtest.records import RequestRecord


class CountKind(enum.Enum):
    """How sure the tokens of each event are. The worst of a run's requests is the run's."""

    EXACT = "exact"  # as many events as tokens
    APPORTIONED = "apportioned"  # some events held several tokens: shared out by characters
    CHUNKS = "chunks"  # no usable usage: each event counts as one token


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`per_chunk[i]` >= 1 tokens came with text event i. `total` is what usage says, or the sum where it says nothing."""

    per_chunk: npt.NDArray[np.int64]
    total: int
    kind: CountKind
    is_mismatch: bool  # usage and the events (or what was asked) cannot both be right

    @property
    def num_text_tokens(self) -> int:
        """Tokens that brought text: the end token, which some servers count, is left out when it can be told."""
        return int(self.per_chunk.sum())


def count_tokens(record: RequestRecord) -> TokenCounts:
    """The tokens of each event of one answer.

    One token of a natural end may bring no text (the end token, counted by many servers): usage that is one above the events
    of such an answer is exact. Whole answers have one event, which holds all tokens.
    """
    num_chunks, total = len(record.chunk_times), record.output_tokens
    ones = np.ones(num_chunks, dtype=np.int64)
    is_over = _is_over_limit(record)
    if total is None:
        return TokenCounts(ones, num_chunks if record.is_stream else 0, CountKind.CHUNKS, is_mismatch=False)
    if total < num_chunks:
        return TokenCounts(ones, total, CountKind.CHUNKS, is_mismatch=True)
    if not record.is_stream:
        return TokenCounts(ones * total, total, CountKind.EXACT, is_mismatch=is_over)
    ended_naturally = bool(record.finish_reasons) and "length" not in record.finish_reasons
    if num_chunks == total or (num_chunks == total - 1 and ended_naturally):
        return TokenCounts(ones, total, CountKind.EXACT, is_mismatch=is_over)
    if num_chunks == 0:  # tokens without any text: there is nothing to lay them over
        return TokenCounts(ones, total, CountKind.APPORTIONED, is_mismatch=is_over)
    return TokenCounts(share_out(total, record.chunk_chars), total, CountKind.APPORTIONED, is_mismatch=is_over)


def _is_over_limit(record: RequestRecord) -> bool:
    """More tokens than were asked for, of a request with one choice."""
    limit = record.target_output_tokens
    return (
        limit is not None
        and record.output_tokens is not None
        and len(record.finish_reasons) <= 1
        and record.output_tokens > limit
    )


def share_out(total: int, chunk_chars: list[int]) -> npt.NDArray[np.int64]:
    """`total` tokens over events by their characters: at least one each, largest remainders first, the sum exact.

    Needs total >= number of events >= 1.
    """
    chars = np.maximum(np.asarray(chunk_chars, dtype=np.float64), 1.0)
    spare = total - len(chars)
    # What an event should have beyond its one token; events shorter than the average token want none.
    wanted = np.maximum(chars * (total / chars.sum()) - 1.0, 0.0)
    if wanted.sum() <= 0.0:
        wanted = chars
    shares = wanted * (spare / wanted.sum())
    whole: npt.NDArray[np.int64] = np.floor(shares).astype(np.int64)
    left = spare - int(whole.sum())
    if left > 0:
        whole[np.argsort(whole - shares, kind="stable")[:left]] += 1
    whole += 1
    return whole
