"""Sampling parameters of one request and their validation.

Owns: the ranges that every API's sampling fields must lie in. Runs in: gateway (validates) and worker (reads).
Must not know: HTTP, logits.
"""

import math

import msgspec

from headrace.protocol.errors import RequestError

MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is drawn from the logits. Defaults sample the model's own distribution.

    `seed` is never absent in the worker: the gateway draws one when the caller gave none, so that a request can be continued
    elsewhere with the same outcome. The draw for output at sequence position p depends on (seed, p, logits) alone.
    """

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 means all
    min_p: float = 0.0  # in [0, 1]
    seed: int = 0  # in [0, 2**63)
    repetition_penalty: float = 1.0  # > 0; over prompt and output tokens (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # in [-2, 2]; output tokens only
    frequency_penalty: float = 0.0  # in [-2, 2]; output tokens only
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, in [-100, 100]

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken (after penalties and bias)."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """True when logits must be changed before choosing, so that a list of the best few does not suffice."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field out of its range. `vocab_size`: the true one, without padding rows."""
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k < 0:
            raise RequestError("top_k must be 0 (off) or a positive number.", param="top_k")
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed must lie between 0 and {MAX_SEED}.", param="seed")
        for token_id, bias in (self.logit_bias or {}).items():
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"logit_bias names token {token_id}; the vocabulary has {vocab_size} tokens.", param="logit_bias"
                )
            _check_range("logit_bias", bias, -100.0, 100.0)


class StopConditions(msgspec.Struct, frozen=True, array_like=True):
    """When a request ends, as far as the worker can see it: by token ids and counts. Stop strings are the gateway's."""

    max_tokens: int  # >= 1: most output tokens
    min_tokens: int = 0  # no end-of-sequence and no stop token before so many output tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field out of its range."""
        if self.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1.", param="max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError("min_tokens must lie between 0 and max_tokens.", param="min_tokens")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"stop_token_ids names token {token_id}; the vocabulary has {vocab_size} tokens.", param="stop_token_ids"
                )


def _check_range(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    too_low = value <= low if low_open else value < low
    if not math.isfinite(value) or too_low or value > high:
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must lie in {bracket}{low:g}, {high:g}].", param=name)
