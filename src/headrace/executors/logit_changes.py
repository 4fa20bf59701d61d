"""Bias, penalties and forbidden tokens: what a request wants changed in its logits before a token is chosen.

Owns: the arithmetic, and which tokens each request has seen so far. Runs in: worker. Must not know: how tokens are drawn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.protocol.step import StepRow


@dataclass(slots=True)
class _SeenTokens:
    """Which tokens stand in a history, kept up to date as it grows: a cache, rebuilt when the history got shorter."""

    prompt_ids: npt.NDArray[np.int64]  # distinct
    output_counts: dict[int, int] = field(default_factory=dict)
    num_counted: int = 0  # tokens of the history


class LogitChanges:
    """Changes rows of logits in place. Holds a little for each request that uses penalties, until it is forgotten."""

    def __init__(self) -> None:
        self._seen: dict[int, _SeenTokens] = {}

    def apply(self, logits: npt.NDArray[np.float32], row: StepRow) -> None:
        """Change logits [V] as the row's sampling parameters and forbidden tokens say, in the order of vLLM's sampler.

        Bias is added; the repetition penalty divides a positive and multiplies a negative logit of every token of prompt and
        output (CTRL, arXiv 1909.05858); the frequency penalty is taken off once for each time that a token stands in the
        output, the presence penalty once if it does; forbidden tokens get -inf.
        """
        sampling = row.sampling
        if sampling.logit_bias:
            num_biased = len(sampling.logit_bias)
            ids = np.fromiter(sampling.logit_bias.keys(), np.int64, num_biased)
            logits[ids] += np.fromiter(sampling.logit_bias.values(), np.float32, num_biased)
        counts_output = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        if counts_output or sampling.repetition_penalty != 1.0:
            self._penalize(logits, row)
        if row.forbidden_token_ids:
            logits[np.array(row.forbidden_token_ids, np.int64)] = -np.inf

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop what is held for these requests; unknown ones are fine."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)

    @property
    def num_held(self) -> int:
        """Requests for which something is held."""
        return len(self._seen)

    def _penalize(self, logits: npt.NDArray[np.float32], row: StepRow) -> None:
        sampling = row.sampling
        seen = self._count(row)
        num_output_ids = len(seen.output_counts)
        output_ids = np.fromiter(seen.output_counts.keys(), np.int64, num_output_ids)
        if sampling.repetition_penalty != 1.0:
            # A token of both prompt and output stands twice in `ids`; both places hold the same new value.
            ids = np.concatenate([seen.prompt_ids, output_ids])
            old = logits[ids]
            penalty = np.float32(sampling.repetition_penalty)
            with np.errstate(over="ignore", divide="ignore"):  # an infinite logit is found, and fails the row, later
                logits[ids] = np.where(old > 0, old / penalty, old * penalty)
        if num_output_ids and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
            counts = np.fromiter(seen.output_counts.values(), np.float32, num_output_ids)
            logits[output_ids] -= np.float32(sampling.frequency_penalty) * counts + np.float32(sampling.presence_penalty)

    def _count(self, row: StepRow) -> _SeenTokens:
        history = row.history
        num_prompt_tokens = row.num_prompt_tokens
        seen = self._seen.get(row.request_id)
        if seen is None or seen.num_counted > len(history):
            seen = _SeenTokens(_distinct(history[:num_prompt_tokens]), num_counted=num_prompt_tokens)
            self._seen[row.request_id] = seen
        counts = seen.output_counts
        for token_id in history[seen.num_counted :]:
            counts[token_id] = counts.get(token_id, 0) + 1
        seen.num_counted = len(history)
        return seen


def _distinct(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.unique(np.fromiter(token_ids, np.int64, len(token_ids)))
