"""The simulated model: an executor without weights whose steps take a stated time and whose text is a pure function.

Owns: `sim:` and its parameters. Runs in: worker. Must not know: scheduling; the KV accounting around it is the real one.

A step of S rows and T tokens, the rows having C tokens of context (past and new) together, takes

    step_ms / 1e3  +  row_us * S / 1e6  +  token_us * T / 1e6  +  kv_ns * C / 1e9   seconds.

The token at a position depends on (prompt, seed, position, salt) alone, whatever else is in the batch; at temperature 0 (or
top_k 1) the seed does not count. Other sampling parameters change nothing. Every token is one of the table of words given to
the executor; end-of-sequence comes only where `output_tokens` puts it.
"""

import hashlib
import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from headrace.executors.uniform import mix64, random_bits
from headrace.protocol.errors import ConfigurationError, ErrorCode
from headrace.protocol.manifest import Manifest
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.step import StepFailure, StepPlan, StepResult, StepRow

PREFIX = "sim:"
MAX_BLOCKS = 10_000_000  # the accounting of each takes memory, though its content takes none
MAX_OVERSLEPT_NS = 2_000_000  # a sleep that was longer than asked shortens the next ones by at most so much


class SimulatedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters of `sim:KEY=VALUE,...`."""

    step_ms: float = 5.0  # time of a step, whatever is in it
    token_us: float = 50.0  # more for each token
    row_us: float = 0.0  # more for each row
    kv_ns: float = 0.0  # more for each token of context that is read
    num_blocks: int = 8192  # size of the KV pool
    block_size: int = 32
    max_model_len: int = 0  # 0: as the model whose tokenizer is used
    output_tokens: int = 0  # 0: until max_tokens; else the output ends after a length between half and one and a half of it
    salt: int = 0  # another text for the same prompts
    fail_rate: float = 1.0  # which part of the requests fails, where fail_after_tokens is set
    fail_after_tokens: int = -1  # -1: never; else these requests fail when they have so many output tokens
    fail_step_every: int = 0  # 0: never; else every so many steps the whole step fails

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "sim:step_ms=5,token_us=50" or the part after the colon. Raises ConfigurationError naming what exists."""
        values: dict[str, int | float] = {}
        kinds = {field.name: field.type for field in msgspec.structs.fields(cls)}
        for part in text.removeprefix(PREFIX).split(","):
            if not part.strip():
                continue
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in kinds:
                raise ConfigurationError(f"sim: has no parameter {name!r}; there are {', '.join(kinds)}.")
            if name in values:
                raise ConfigurationError(f"sim: {name} is given twice.")
            try:
                values[name] = kinds[name](value)
            except ValueError:
                kind = "a whole number" if kinds[name] is int else "a number"
                raise ConfigurationError(f"sim: {name} must be {kind}, not {value!r}.") from None
        model = cls(**values)  # type: ignore[arg-type]  # each value was made by its field's own type
        model._check()
        return model

    def seconds(self, num_rows: int, num_tokens: int, num_context_tokens: int) -> float:
        """How long such a step takes."""
        return (
            self.step_ms / 1e3
            + self.row_us * num_rows / 1e6
            + self.token_us * num_tokens / 1e6
            + self.kv_ns * num_context_tokens / 1e9
        )

    def _check(self) -> None:
        least = {"num_blocks": 1, "block_size": 1, "fail_after_tokens": -1, "salt": 0}
        most = {"fail_rate": 1.0, "salt": 2**63 - 1, "num_blocks": MAX_BLOCKS}
        for name in self.__struct_fields__:
            value, low, high = getattr(self, name), least.get(name, 0), most.get(name, math.inf)
            if not math.isfinite(value) or not low <= value <= high:
                limits = f"at least {low}" if high == math.inf else f"between {low} and {high}"
                raise ConfigurationError(f"sim: {name} must be {limits}, not {value}.")
        if self.fail_rate != 1.0 and self.fail_after_tokens < 0:
            raise ConfigurationError("sim: fail_rate needs fail_after_tokens.")


class SimulatedExecutor:
    """An Executor that sleeps instead of computing. `now_ns` and `sleep` are the time it lives in (a test gives its own)."""

    def __init__(
        self,
        model: SimulatedModel,
        manifest: Manifest,
        word_token_ids: Sequence[int],
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        eos_token_ids = frozenset(manifest.eos_token_ids)
        if not word_token_ids or not all(0 <= token_id < manifest.vocab_size for token_id in word_token_ids):
            raise ConfigurationError("The simulated model needs token ids of words, each within the vocabulary.")
        if not eos_token_ids.isdisjoint(word_token_ids):
            raise ConfigurationError("The simulated model's words must not hold an end-of-sequence token.")
        if model.output_tokens and not eos_token_ids:
            raise ConfigurationError("sim: output_tokens needs a tokenizer with an end-of-sequence token.")
        self._model = model
        self._words = tuple(word_token_ids)
        self._eos_token_id = min(eos_token_ids, default=-1)
        self._now_ns = now_ns
        self._sleep = sleep
        self._overslept_ns = 0
        self._num_steps = 0
        self._keys: dict[int, int] = {}  # request id -> key of its text; kept until the request is released
        self._spec = ExecutorSpec(
            model_id=f"sim-{model.salt}-{manifest.identity}",
            kv_format=f"sim-{model.block_size}",
            vocab_size=manifest.vocab_size,
            eos_token_ids=eos_token_ids,
            max_model_len=model.max_model_len or manifest.max_model_len,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
        )

    @classmethod
    def from_spec(
        cls,
        text: str,
        manifest: Manifest,
        word_token_ids: Sequence[int],
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """From the text of `--model sim:...`. Raises ConfigurationError for a parameter that does not exist or cannot be."""
        return cls(SimulatedModel.parse(text), manifest, word_token_ids, now_ns=now_ns, sleep=sleep)

    @property
    def spec(self) -> ExecutorSpec:
        """What this executor offers."""
        return self._spec

    def execute(self, plan: StepPlan) -> StepResult:
        """Choose the tokens, then sleep for the rest of the step's time. Raises RuntimeError where fail_step_every says so."""
        began_ns = self._now_ns()
        for request_id in plan.released_ids:
            self._keys.pop(request_id, None)
        if not plan.rows:
            return StepResult(plan.step_id, {})
        self._num_steps += 1
        if self._model.fail_step_every and self._num_steps % self._model.fail_step_every == 0:
            raise RuntimeError("The simulated device failed, as fail_step_every asks.")
        tokens: dict[int, int] = {}
        failures: dict[int, StepFailure] = {}
        num_context_tokens = 0
        for row in plan.rows:
            num_context_tokens += row.start_position + len(row.token_ids)
            if row.samples:
                chosen = self._choose(row)
                if isinstance(chosen, StepFailure):
                    failures[row.request_id] = chosen
                else:
                    tokens[row.request_id] = chosen
        sampled_ns = self._now_ns()
        self._hold(began_ns, self._model.seconds(len(plan.rows), plan.num_tokens, num_context_tokens))
        return StepResult(
            plan.step_id,
            tokens,
            failures,
            forward_ns=self._now_ns() - sampled_ns,
            sample_ns=sampled_ns - began_ns,
        )

    def close(self) -> None:
        """Forget every request."""
        self._keys.clear()

    def _hold(self, began_ns: int, seconds: float) -> None:
        """Sleep until the step has taken its time; what a sleep took too long is taken off the next ones."""
        end_ns = began_ns + round(seconds * 1e9) - self._overslept_ns
        remaining_ns = end_ns - self._now_ns()
        if remaining_ns > 0:
            self._sleep(remaining_ns / 1e9)
        self._overslept_ns = min(max(self._now_ns() - end_ns, 0), MAX_OVERSLEPT_NS)

    def _choose(self, row: StepRow) -> int | StepFailure:
        model = self._model
        position = len(row.history)
        key = self._keys.get(row.request_id)
        if key is None:
            key = self._keys[row.request_id] = self._key(row)
        index = position - row.num_prompt_tokens
        if index == model.fail_after_tokens and mix64(key ^ 1) < model.fail_rate * 2**64:
            return StepFailure(ErrorCode.EXECUTION_FAILED.value.code, "The simulated model failed, as fail_after_tokens asks.")
        if model.output_tokens and self._ends(row, key, index):
            return self._eos_token_id
        words = self._words
        place = random_bits(key, position) % len(words)
        if row.forbidden_token_ids:
            for step in range(len(words)):
                token_id = words[(place + step) % len(words)]
                if token_id not in row.forbidden_token_ids:
                    return token_id
            return StepFailure(ErrorCode.EXECUTION_FAILED.value.code, "Every word of the simulated model is forbidden.")
        return words[place]

    def _key(self, row: StepRow) -> int:
        """64 bits that stand for prompt, seed and salt."""
        prompt = array("q", row.history[: row.num_prompt_tokens])
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8, salt=self._model.salt.to_bytes(8, "little")).digest()
        seed = 0 if row.sampling.is_greedy else 1 + row.sampling.seed
        return random_bits(seed, int.from_bytes(digest, "little"))

    def _ends(self, row: StepRow, key: int, index: int) -> bool:
        """Whether end-of-sequence is due: once, at the first output from the drawn length on where it is not forbidden."""
        around = self._model.output_tokens
        length = max(1, around // 2 + mix64(key ^ 2) % (around + 1))
        if index < length - 1 or self._eos_token_id in row.forbidden_token_ids:
            return False
        first = row.num_prompt_tokens + length - 1
        return not any(row.history[at] == self._eos_token_id for at in range(first, len(row.history)))
