"""The Protocol classes at which the shell is joined to the core. Each has a contract suite in tests/contracts.

Owns: nothing but signatures. Runs in: everywhere. Must not know: any implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.protocol.messages import EventBatch, GatewayMessage
from headrace.protocol.step import StepPlan, StepResult


class Clock(Protocol):
    """Monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start, never backwards."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """What an executor offers. `kv_format` names the bytes in a block (precision, layout): part of every prefix-cache key."""

    model_id: str  # identity of the weights (a content hash or the like), not the served name
    kv_format: str
    vocab_size: int  # true vocabulary, without padding rows
    eos_token_ids: frozenset[int]
    max_model_len: int  # what the model was made for
    block_size: int  # token positions in one block
    num_blocks: int


class Executor(Protocol):
    """Runs the model over a step plan. One caller, one thread."""

    @property
    def spec(self) -> ExecutorSpec:
        """What this executor offers; constant over its life."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the rows and draw the wanted tokens. A row that cannot be done is a failure in the result, not an exception.

        An exception means that the step as a whole failed (device lost, out of memory): the caller ends every row of it.
        """
        ...

    def close(self) -> None:
        """Give back what it holds. The executor cannot be used afterwards."""
        ...


class RequestSource(Protocol):
    """Where a worker's messages come from."""

    def drain_nowait(self, max_messages: int) -> list[GatewayMessage]:
        """What has arrived, oldest first, at most so many; an empty list when nothing has."""
        ...

    def wait_message(self, timeout_seconds: float) -> bool:
        """Sleep until something has arrived (True) or the time is over (False)."""
        ...


class EventSink(Protocol):
    """Where a worker's events go. Bounded: a full one refuses, and the caller keeps the batch and tries again."""

    def publish_nowait(self, reply_ring: int, batch: EventBatch) -> bool:
        """Hand over one batch; False when there is no room. Raises KeyError for a ring that does not exist."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. Safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """The true vocabulary: ids at or above it name no token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `parse_special`: whether markers like <|im_end|> in the text become control tokens."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids taken as a whole."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text (b"" for control tokens); concatenated, they are the text in UTF-8."""
        ...
