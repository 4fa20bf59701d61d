"""Fields that clients may send and this server does not implement: which of their values change nothing and so pass.

Owns: that table. Runs in: gateway. Must not know: anything else. Everything not in a field's row is refused, never ignored.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from headrace.protocol.errors import ErrorCode, RequestError

Passes = Callable[[Any], bool]


def _none(value: Any) -> bool:
    return value is None


def _nothing(value: Any) -> bool:
    """Null, false and whatever is empty."""
    return value is None or value is False or value in ([], {}, "")


def _false(value: Any) -> bool:
    return value is None or value is False


def _one_of(*allowed: Any) -> Passes:
    return lambda value: value is None or any(value == item and type(value) is type(item) for item in allowed)


# Values that pass, by field. Fields shared by both endpoints stand here once.
PASSES: dict[str, Passes] = {
    "logprobs": _false,
    "top_logprobs": _one_of(0),
    "prompt_logprobs": _none,
    "logprob_token_ids": _nothing,
    "use_beam_search": _false,
    "response_format": _one_of({"type": "text"}),
    "structured_outputs": _none,
    "guided_json": _none,
    "guided_regex": _none,
    "guided_choice": _none,
    "guided_grammar": _none,
    "grammar": _none,
    "allowed_token_ids": _none,
    "bad_words": _nothing,
    "logits_processors": _nothing,
    "truncate_prompt_tokens": _none,
    "return_token_ids": _false,
    "return_tokens_as_token_ids": _false,
    "repetition_detection": _none,
    "kv_transfer_params": _nothing,
    "vllm_xargs": _nothing,
    "store": _false,
    "tools": _nothing,
    "tool_choice": _one_of("none", "auto"),
    "functions": _nothing,
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"]),
    "audio": _none,
    "prediction": _none,
    "web_search_options": _none,
    "reasoning_effort": _one_of("none"),
    "thinking_token_budget": _none,
    "include_reasoning": _one_of(True),
    "verbosity": _one_of("medium"),
    "echo": _false,
    "add_special_tokens": _false,
    "chat_template": _none,
    "documents": _nothing,
    "mm_processor_kwargs": _nothing,
    "suffix": _nothing,
}


def not_implemented(param: str) -> RequestError:
    """The refusal of a value that would matter."""
    message = f"This server does not implement this value of {param}; leave it out."
    return RequestError(message, code=ErrorCode.UNSUPPORTED_VALUE, param=param)


def rows_for(body_type: type[msgspec.Struct], implemented: frozenset[str] = frozenset()) -> tuple[tuple[str, Passes], ...]:
    """The table's rows for the fields of one body type, without those that its endpoint does implement."""

    def rows() -> Iterator[tuple[str, Passes]]:
        for field in body_type.__struct_fields__:
            if field in PASSES and field not in implemented:
                yield field, PASSES[field]

    return tuple(rows())


def refuse_unsupported(request: msgspec.Struct, rows: tuple[tuple[str, Passes], ...]) -> None:
    """Raise RequestError UNSUPPORTED_VALUE naming the first field whose value would matter."""
    for field, passes in rows:
        value = getattr(request, field)
        if value is not None and not passes(value):
            raise not_implemented(field)
