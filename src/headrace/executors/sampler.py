"""Draws the next token of every row of a step: a pure function of (seed, position, logits, history), whatever else is batched.

Owns: which rows the short list serves, and the way over all logits for the others. Runs in: worker. Must not know: OpenVINO.

Greedy rows take the first of the graph's best candidates. Others draw from the candidates with bounds on the remaining mass
(inverse_cdf.py). What is left undecided, and what changes its logits, goes over all logits of its row; both ways give the same
token. Order of operations: bias, penalties, forbidden tokens, temperature, min_p, top_k, top_p; ties: the lower id is first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.executors.inverse_cdf import Draws, draw, draw_from_all, tail_bounds
from headrace.executors.logit_changes import LogitChanges
from headrace.executors.uniform import uniform
from headrace.protocol.errors import ErrorCode
from headrace.protocol.step import StepFailure, StepRow

_NOT_FINITE = StepFailure(
    ErrorCode.EXECUTION_FAILED.value.code, "The model gave logits that are not numbers (NaN or infinity) for this request."
)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the graph says about R rows, as in protocol/graph.py without the middle axis. Views: valid until the next step."""

    logits: npt.NDArray[np.float32]  # [R, V]
    top_values: npt.NDArray[np.float32]  # [R, K], descending
    top_indices: npt.NDArray[np.int32]  # [R, K]
    log_normalizer: npt.NDArray[np.float32]  # [R]


class Sampler:
    """Samples steps. `num_full_rows` counts the rows for which all logits were looked at."""

    def __init__(self, vocab_size: int) -> None:
        self.num_full_rows = 0
        self._vocab_size = vocab_size
        self._changes = LogitChanges()

    @property
    def num_held(self) -> int:
        """Requests for which something is held."""
        return self._changes.num_held

    def forget(self, request_ids: Iterable[int]) -> None:
        """Drop what is held for requests that ended."""
        self._changes.forget(request_ids)

    def sample(self, rows: Sequence[StepRow], scores: Scores) -> tuple[dict[int, int], dict[int, StepFailure]]:
        """Tokens and failures by request id; every row stands in one of the two."""
        tokens: dict[int, int] = {}
        failures: dict[int, StepFailure] = {}
        if not rows:
            return tokens, failures
        usable = self._usable(scores)
        greedy: list[int] = []
        drawn: list[int] = []
        full: list[int] = []
        for index, row in enumerate(rows):
            if not usable[index] or row.forbidden_token_ids or row.sampling.changes_logits:
                full.append(index)
            elif row.sampling.is_greedy:
                greedy.append(index)
            else:
                drawn.append(index)
        for indices, choose in ((greedy, self._greedy), (drawn, self._drawn)):
            if indices:
                for index, token_id in zip(indices, choose(rows, scores, indices), strict=True):
                    if token_id < 0:
                        full.append(index)
                    else:
                        tokens[rows[index].request_id] = token_id
        self.num_full_rows += len(full)
        for index in full:
            self._sample_full(rows[index], scores.logits[index], tokens, failures)
        return tokens, failures

    def _usable(self, scores: Scores) -> list[bool]:
        """Which rows' short lists can be relied on: finite numbers (NaN anywhere shows in the normaliser), true ids only."""
        finite = np.isfinite(scores.log_normalizer) & np.isfinite(scores.top_values[:, 0])
        if int(scores.top_indices.max()) >= self._vocab_size:
            finite &= scores.top_indices.max(axis=1) < self._vocab_size
        usable: list[bool] = finite.tolist()
        return usable

    def _greedy(self, rows: Sequence[StepRow], scores: Scores, indices: list[int]) -> list[int]:
        """The best token of each row, -1 where more than the list may share the first place."""
        values, ids = scores.top_values, scores.top_indices
        chosen: list[int] = ids[indices, 0].tolist()
        if values.shape[1] == 1:
            return chosen if self._vocab_size == 1 else [-1] * len(indices)
        tied = values[:, 0] == values[:, 1]
        if tied.any():
            for place, index in enumerate(indices):
                if tied[index]:
                    best = values[index] == values[index, 0]
                    whole = bool(best.all()) and values.shape[1] < self._vocab_size
                    chosen[place] = -1 if whole else int(ids[index][best].min())
        return chosen

    def _drawn(self, rows: Sequence[StepRow], scores: Scores, indices: list[int]) -> list[int]:
        """Drawn tokens of rows that take the logits as they are, -1 where the short list does not decide."""
        values, ids = scores.top_values[indices], scores.top_indices[indices]
        num_candidates = values.shape[1]
        complete = num_candidates >= self._vocab_size
        for place in np.flatnonzero((values[:, 1:] == values[:, :-1]).any(axis=1)):
            ids[place] = ids[place][np.lexsort((ids[place], -values[place]))]
        best = values[:, :1].astype(np.float64)
        log_values = values - best
        draws = _draws([rows[index] for index in indices])
        log_normalizer = scores.log_normalizer[indices] - best[:, 0]
        low, high = tail_bounds(log_values, log_normalizer, draws.temperature, self._vocab_size - num_candidates)
        places = draw(log_values, draws, low, high, complete=complete)
        chosen = ids[np.arange(len(indices)), places]
        undecided = places < 0
        if not complete:  # tokens beyond the list may be as good as its last one, and come before it
            undecided |= values[np.arange(len(indices)), places] == values[:, -1]
        drawn: list[int] = np.where(undecided, -1, chosen).tolist()
        return drawn

    def _sample_full(
        self,
        row: StepRow,
        row_logits: npt.NDArray[np.float32],
        tokens: dict[int, int],
        failures: dict[int, StepFailure],
    ) -> None:
        logits = row_logits[: self._vocab_size]
        if not np.isfinite(logits.max()):  # NaN wins every comparison of max
            failures[row.request_id] = _NOT_FINITE
            return
        if row.sampling.changes_logits or row.forbidden_token_ids:
            logits = logits.copy()
            self._changes.apply(logits, row)
            if not np.isfinite(logits.max()):
                failures[row.request_id] = StepFailure(
                    ErrorCode.EXECUTION_FAILED.value.code, "Penalties and forbidden tokens leave no token to choose."
                )
                return
        tokens[row.request_id] = int(logits.argmax()) if row.sampling.is_greedy else draw_from_all(logits, _draws([row]))


def _draws(rows: Sequence[StepRow]) -> Draws:
    samplings = [row.sampling for row in rows]
    return Draws(
        temperature=np.array([sampling.temperature for sampling in samplings]),
        top_p=np.array([sampling.top_p for sampling in samplings]),
        top_k=np.array([sampling.top_k for sampling in samplings]),
        min_p=np.array([sampling.min_p for sampling in samplings]),
        uniform=np.array([uniform(row.sampling.seed, len(row.history)) for row in rows]),
    )
