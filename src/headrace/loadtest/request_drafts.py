"""A request before it has a number and a time, and the JSON body that both OpenAI APIs want.

Owns: RequestDraft, request_body, the options of workloads. Runs in: load tool. Must not know: where texts come from.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.loadtest.records import RunSettings

# Names in RunSettings.extra that workloads read; values are numbers as text.
TURNS = "turns"  # chat: requests of one conversation
THINK_SECONDS = "think_seconds"  # chat: mean pause between an answer and the next turn
SYSTEM_TOKENS = "system_tokens"  # chat: length of a tenant's system prompt
NUM_TENANTS = "num_tenants"  # chat: each with a system prompt of its own; shares of traffic fall as 1/rank (Zipf)
QUESTIONS_PER_DOCUMENT = "questions_per_document"  # long-document: requests in a row on one document
CLASS_HEADERS = "class_headers"  # trace: "1" sends each request's recorded class, tenant and priority
REPEATS_PROMPTS = "repeats_prompts"  # own prompts: "1" begins anew at the file's end (a prefix cache will know them)
# Names in RunSettings.extra that a plan writes, for the reader of a report.
SALT = "salt"
LENGTH_SOURCE = "length_source"
CALIBRATION = "calibration"
CONTEXT_TOKENS = "context_tokens"


class WorkloadError(ValueError):
    """A workload cannot be made as asked; the text says what to give instead."""


class RequestDraft(msgspec.Struct, kw_only=True, frozen=True):
    """One request without index and due time. `then`: later turns of its conversation. `headers`: of this request alone."""

    body: dict[str, Any]
    target_prompt_tokens: int | None
    target_output_tokens: int | None
    group: str = ""
    think_seconds: float = 0.0
    headers: dict[str, str] = {}
    then: tuple["RequestDraft", ...] = ()


def request_body(settings: RunSettings, prompt: str | Sequence[Mapping[str, str]], output_tokens: int) -> dict[str, Any]:
    """The body without stream flags. A text becomes one user message where the API is chat; messages become a text elsewhere.

    `ignore_eos` (vLLM, SGLang, llama.cpp, Headrace) makes answers as long as asked; servers that do not know it end earlier,
    which the figures warn of.
    """
    body: dict[str, Any] = {"model": settings.model}
    if settings.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(item) for item in prompt]
    else:
        body["prompt"] = prompt if isinstance(prompt, str) else _transcript(prompt)
    body |= {"max_tokens": output_tokens, "temperature": settings.temperature}
    if settings.ignores_eos:
        body["ignore_eos"] = True
    return body


def _transcript(messages: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(f"{item['role']}: {item['content']}" for item in messages) + "\n\nassistant:"


def number_option(settings: RunSettings, name: str, default: float, *, least: float = 0.0) -> float:
    """An option of a workload from the settings' extra. WorkloadError when it is no finite number of at least `least`."""
    text = settings.extra.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise WorkloadError(f"{name} is {text!r}; it must be a number of at least {least:g}")
    return value


def count_option(settings: RunSettings, name: str, default: int, *, least: int = 1) -> int:
    """As number_option, for whole numbers."""
    value = number_option(settings, name, default, least=least)
    if value != int(value):
        raise WorkloadError(f"{name} is {value:g}; it must be a whole number")
    return int(value)
