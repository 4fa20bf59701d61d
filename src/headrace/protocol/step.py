"""One step: what the scheduler asks of an executor, and what comes back.

Owns: StepPlan and StepResult. Runs in: worker, inside one process (never serialised). Must not know: devices, layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.protocol.sampling import SamplingParams


@dataclass(slots=True)  # not frozen: a frozen one takes three times as long to make, and one is made for each token
class StepRow:
    """Some consecutive tokens of one sequence, to be computed in this step. Nobody changes it.

    The tokens stand at positions start_position .. start_position + len(token_ids) - 1. Position p lives in slot
    (block_ids[p // block_size], p % block_size). Everything before start_position is in the KV storage already.
    """

    request_id: int
    token_ids: Sequence[int]
    start_position: int
    block_ids: Sequence[int]  # covers every position up to the last of token_ids
    samples: bool  # True when token_ids ends at the sequence's last token, so that the next one is to be drawn
    sampling: SamplingParams
    history: Sequence[int]  # the whole sequence so far (prompt + output), read-only; its length is the position drawn for
    num_prompt_tokens: int
    forbidden_token_ids: Sequence[int] = ()  # must not be drawn now (min_tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Rows of one request never repeat within a plan."""

    step_id: int
    rows: list[StepRow]
    num_tokens: int  # sum of len(row.token_ids)
    released_ids: list[int] = field(default_factory=list)  # requests that ended since the last plan: forget what you hold


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why one row failed; the others of the batch are unaffected."""

    code: str  # an ErrorCode's wire code
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made. A sampling row stands in exactly one of `tokens` and `failures`; any other at most in `failures`."""

    step_id: int
    tokens: dict[int, int]  # request id -> drawn token
    failures: dict[int, StepFailure] = field(default_factory=dict)
    forward_ns: int = 0
    sample_ns: int = 0
    num_padding_tokens: int = 0  # positions computed in vain because rows of different length lay in one rectangle
