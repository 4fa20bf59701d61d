"""An executor whose memory is checked: no model, but every wrong block, slot or share is found at once.

Owns: FakeExecutor. Runs in: tests, simulation.
Must not know: how plans are made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.step import StepFailure, StepPlan, StepResult, StepRow

_MASK = (1 << 64) - 1


class MemoryFault(AssertionError):  # noqa: N818 - it is an assertion that failed, not an error to handle
    """A plan would read or write the KV storage wrongly. A test that meets one has found a defect of the scheduler."""


@dataclass(slots=True)
class _Extent:
    """What a live request has in the storage: the block table as last seen (the caller's own list) and how far it is filled."""

    block_ids: Sequence[int]
    num_tokens: int


class FakeExecutor:
    """Implements protocol.ports.Executor with checked memory.

    A slot keeps the token id written to it and a fingerprint of the whole context up to it, as a real KV entry depends on all
    tokens before. To compute a row, the context is read back through the block table and compared with `row.history`; the next
    token is a hash of it, so it depends on every token before and on nothing else (with temperature > 0 on the seed too).

    `failing` names rows that fail, with the reason; `fail_next_step` is raised by the next execute, once. `on_step` sees each
    plan before it is executed. The block tables of a request must be one list changed in place, or be given anew in each plan.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        *,
        failing: Mapping[int, StepFailure] | None = None,
        on_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.failing = dict(failing or {})
        self.fail_next_step: Exception | None = None
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._spec = spec
        self._on_step = on_step
        self._slots: list[list[tuple[int, int] | None]] = [[None] * spec.block_size for _ in range(spec.num_blocks)]
        self._live: dict[int, _Extent] = {}
        self._last_step_id = -1
        self._closed = False

    @property
    def spec(self) -> ExecutorSpec:
        """What was given."""
        return self._spec

    @property
    def live_request_ids(self) -> set[int]:
        """Requests that were computed and not released."""
        return set(self._live)

    def execute(self, plan: StepPlan) -> StepResult:
        """Check the plan, compute its rows. Raises MemoryFault for a wrong plan, and what `fail_next_step` says."""
        if self._closed:
            raise MemoryFault("execute after close")
        if self._on_step is not None:
            self._on_step(plan)
        self._check_plan(plan)
        for request_id in plan.released_ids:
            self._live.pop(request_id, None)
        if self.fail_next_step is not None:
            error, self.fail_next_step = self.fail_next_step, None
            raise error
        contexts = [self._read_context(row) for row in plan.rows]
        self._check_writes(plan)
        tokens: dict[int, int] = {}
        failures: dict[int, StepFailure] = {}
        for row, fingerprint in zip(plan.rows, contexts, strict=True):
            failure = self.failing.get(row.request_id)
            if failure is not None:
                failures[row.request_id] = failure
                continue
            fingerprint = self._write(row, fingerprint)
            if row.samples:
                tokens[row.request_id] = self._draw(row, fingerprint)
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        return StepResult(plan.step_id, tokens, failures)

    def close(self) -> None:
        """Further steps are faults. Closing twice is fine."""
        self._closed = True

    def _check_plan(self, plan: StepPlan) -> None:
        if plan.step_id <= self._last_step_id:
            raise MemoryFault(f"step {plan.step_id} after step {self._last_step_id}")
        self._last_step_id = plan.step_id
        if len({row.request_id for row in plan.rows}) != len(plan.rows):
            raise MemoryFault("a request has two rows in one plan")
        if plan.num_tokens != sum(len(row.token_ids) for row in plan.rows):
            raise MemoryFault(f"num_tokens is {plan.num_tokens}, the rows have another sum")
        for row in plan.rows:
            self._check_row(row)

    def _check_row(self, row: StepRow) -> None:
        name, end = f"request {row.request_id}", row.start_position + len(row.token_ids)
        if not row.token_ids or list(row.history[row.start_position : end]) != list(row.token_ids):
            raise MemoryFault(f"{name}: the row's tokens are not those of its history at {row.start_position}")
        if row.samples != (end == len(row.history)):
            raise MemoryFault(f"{name}: samples is {row.samples} for a row up to {end} of {len(row.history)} tokens")
        if not 1 <= row.num_prompt_tokens <= len(row.history) or len(row.history) > self._spec.max_model_len:
            raise MemoryFault(f"{name}: {row.num_prompt_tokens} prompt tokens of {len(row.history)}")
        if len(row.block_ids) * self._spec.block_size < end:
            raise MemoryFault(f"{name}: {len(row.block_ids)} blocks do not cover {end} positions")
        if len(set(row.block_ids)) != len(row.block_ids) or not all(0 <= b < self._spec.num_blocks for b in row.block_ids):
            raise MemoryFault(f"{name}: block table {list(row.block_ids)}")

    def _read_context(self, row: StepRow) -> int:
        """Compare the slots before the row with the history; the fingerprint of that context."""
        fingerprint = 0
        for position in range(row.start_position):
            token_id = row.history[position]
            fingerprint = _chain(fingerprint, token_id)
            slot = self._slots[row.block_ids[position // self._spec.block_size]][position % self._spec.block_size]
            if slot != (token_id, fingerprint):
                found = (
                    "nothing" if slot is None else f"token {slot[0]} of {'this' if slot[0] == token_id else 'another'} context"
                )
                raise MemoryFault(f"request {row.request_id}: position {position} should hold token {token_id}, holds {found}")
        return fingerprint

    def _check_writes(self, plan: StepPlan) -> None:
        """No slot is written twice in a step, and none that a live request reads, except its own anew."""
        size = self._spec.block_size
        readers: dict[tuple[int, int], int] = {}
        planned = {row.request_id: _Extent(row.block_ids, row.start_position) for row in plan.rows}
        for request_id, extent in (self._live | planned).items():
            for position in range(min(extent.num_tokens, len(extent.block_ids) * size)):
                readers[extent.block_ids[position // size], position % size] = request_id
        writers: dict[tuple[int, int], int] = {}
        for row in plan.rows:
            for position in range(row.start_position, row.start_position + len(row.token_ids)):
                slot = (row.block_ids[position // size], position % size)
                if slot in writers:
                    raise MemoryFault(f"requests {writers[slot]} and {row.request_id} both write slot {slot}")
                if slot in readers:
                    raise MemoryFault(f"request {row.request_id} writes slot {slot}, which request {readers[slot]} reads")
                writers[slot] = row.request_id

    def _write(self, row: StepRow, fingerprint: int) -> int:
        """Fill the row's slots; the fingerprint of the context with it."""
        size = self._spec.block_size
        for position, token_id in enumerate(row.token_ids, row.start_position):
            fingerprint = _chain(fingerprint, token_id)
            self._slots[row.block_ids[position // size]][position % size] = (token_id, fingerprint)
        self._live[row.request_id] = _Extent(row.block_ids, row.start_position + len(row.token_ids))
        return fingerprint

    def _draw(self, row: StepRow, fingerprint: int) -> int:
        """A token as a function of the context (and the seed, unless greedy), the first allowed one from there on."""
        if not row.sampling.is_greedy:
            fingerprint = _chain(fingerprint, row.sampling.seed)
        forbidden = set(row.forbidden_token_ids)
        first = (fingerprint >> 32) % self._spec.vocab_size
        for step in range(self._spec.vocab_size):
            token_id = (first + step) % self._spec.vocab_size
            if token_id not in forbidden:
                return token_id
        raise MemoryFault(f"request {row.request_id}: every token is forbidden")


def _chain(fingerprint: int, value: int) -> int:
    """Mix a value into a 64-bit fingerprint (the finalizer of SplitMix64, Steele et al., OOPSLA 2014)."""
    mixed = (fingerprint * 0x9E3779B97F4A7C15 + value + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
