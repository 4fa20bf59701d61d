"""Chat with turns: a system prompt that a tenant's conversations share, and a history that grows.

Owns: draft_conversations. Runs in: load tool. Must not know: HTTP, arrival times.
The history's answers are written here, of the length that was asked for, and not the server's own: the same conversation then
comes again whatever a server answers. A prefix cache can reuse all of the turn before except its answer.
"""

import random
from collections.abc import Iterator

from headrace.loadtest.prompts import PromptWriter
from headrace.loadtest.records import RunSettings
from headrace.loadtest.request_drafts import (
    NUM_TENANTS,
    SYSTEM_TOKENS,
    THINK_SECONDS,
    TURNS,
    RequestDraft,
    WorkloadError,
    count_option,
    number_option,
    request_body,
)

DEFAULT_TURNS = 4
DEFAULT_THINK_SECONDS = 1.0
DEFAULT_SYSTEM_TOKENS = 256
DEFAULT_TENANTS = 4
DEFAULT_USER_TOKENS = 48
DEFAULT_ANSWER_TOKENS = 96


def turns_of(settings: RunSettings) -> int:
    """Requests of one conversation, by the settings."""
    return count_option(settings, TURNS, DEFAULT_TURNS)


def draft_conversations(
    settings: RunSettings, writer: PromptWriter, key: str, context_tokens: int | None
) -> Iterator[RequestDraft]:
    """Endless conversations, each a first turn with the later ones in `then`.

    `settings.prompt_tokens` is the length of each user message, `output_tokens` that of each answer. Conversations end early
    rather than outgrow `context_tokens`. With several tenants the group is the tenant. WorkloadError when not even the first
    turn fits.
    """
    num_tenants = count_option(settings, NUM_TENANTS, DEFAULT_TENANTS)
    system_tokens = count_option(settings, SYSTEM_TOKENS, DEFAULT_SYSTEM_TOKENS, least=0)
    user_tokens = settings.prompt_tokens or DEFAULT_USER_TOKENS
    answer_tokens = settings.output_tokens or DEFAULT_ANSWER_TOKENS
    first = system_tokens + user_tokens + answer_tokens + writer.calibration.overhead_tokens
    if context_tokens is not None and first > context_tokens:
        raise WorkloadError(
            f"the first turn takes {first:.0f} tokens with its answer; the model's context has {context_tokens}"
        )
    return _drafts(settings, writer, key, context_tokens, num_tenants, system_tokens, user_tokens, answer_tokens)


def _drafts(
    settings: RunSettings,
    writer: PromptWriter,
    key: str,
    context_tokens: int | None,
    num_tenants: int,
    system_tokens: int,
    user_tokens: int,
    answer_tokens: int,
) -> Iterator[RequestDraft]:
    num_turns = turns_of(settings)
    think_seconds = number_option(settings, THINK_SECONDS, DEFAULT_THINK_SECONDS)
    source = random.Random(f"{settings.seed}:{key}:conversations")  # noqa: S311 - not for secrets
    shares = [1 / rank for rank in range(1, num_tenants + 1)]
    number = 0
    while True:
        tenant = source.choices(range(num_tenants), weights=shares)[0]
        messages: list[dict[str, str]] = []
        tokens = writer.calibration.overhead_tokens
        if system_tokens:
            messages.append({"role": "system", "content": writer.part(system_tokens, key, "system", tenant)})
            tokens += system_tokens
        turns: list[RequestDraft] = []
        for turn in range(num_turns):
            pause = source.expovariate(1 / think_seconds) if turn and think_seconds else 0.0
            tokens += user_tokens
            if context_tokens is not None and tokens + answer_tokens > context_tokens:
                break
            messages.append({"role": "user", "content": writer.part(user_tokens, key, number, turn, "user")})
            turns.append(
                RequestDraft(
                    body=request_body(settings, messages, answer_tokens),
                    target_prompt_tokens=round(tokens),
                    target_output_tokens=answer_tokens,
                    group=f"tenant-{tenant + 1}" if num_tenants > 1 else "",
                    think_seconds=pause,
                )
            )
            messages.append({"role": "assistant", "content": writer.part(answer_tokens, key, number, turn, "answer")})
            tokens += answer_tokens
        yield _joined(turns)
        number += 1


def _joined(turns: list[RequestDraft]) -> RequestDraft:
    first = turns[0]
    return RequestDraft(
        body=first.body,
        target_prompt_tokens=first.target_prompt_tokens,
        target_output_tokens=first.target_output_tokens,
        group=first.group,
        think_seconds=first.think_seconds,
        then=tuple(turns[1:]),
    )
