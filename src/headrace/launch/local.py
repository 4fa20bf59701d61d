"""`headrace run`: one answer in this process, streamed to the terminal. The same scheduler and executor as in the server.

Owns: answer. Runs in: CLI. Must not know: rings, HTTP.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.launch.executor import build_executor
from headrace.launch.model import ServedModel, prepare_model
from headrace.launch.settings import Settings
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.graph import TOKENIZER_FILE
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import GenerationRequest, TokenEvent, Usage
from headrace.protocol.ports import Executor
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.text.chat_template import encode_chat, load_chat_template
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class LocalOptions:
    """What `headrace run` was asked for beside the prompt. `raw`: no chat template."""

    system: str | None
    max_tokens: int | None
    temperature: float
    seed: int
    raw: bool
    stats: bool


def answer(settings: Settings, prompt: str, options: LocalOptions) -> None:
    """Print the answer as it is made. Raises RequestError when the prompt does not fit, ModelError, ConfigurationError."""
    model = prepare_model(settings)
    tokenizer = TextTokenizer.from_file(
        Path(model.folder) / TOKENIZER_FILE,
        bos_token_id=model.manifest.bos_token_id,
        add_bos_token=model.manifest.add_bos_token,
    )
    token_ids = _prompt_ids(model, tokenizer, prompt, options)
    executor = build_executor(settings, model)
    try:
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=settings.scheduler.max_num_seqs,  # 1: the command sets it
                max_num_batched_tokens=settings.scheduler.max_num_batched_tokens,
                max_model_len=settings.scheduler.max_model_len or model.manifest.max_model_len,
                enable_prefix_caching=False,
            ),
            executor.spec,
        )
        request = _request(model, scheduler, token_ids, options)
        _print_answer(scheduler, executor, request, IncrementalDetokenizer(tokenizer), show_stats=options.stats)
    finally:
        executor.close()


def _prompt_ids(model: ServedModel, tokenizer: TextTokenizer, prompt: str, options: LocalOptions) -> list[int]:
    manifest = model.manifest
    template = load_chat_template(
        Path(model.folder), tokenizer, bos_token_id=manifest.bos_token_id, eos_token_ids=manifest.eos_token_ids
    )
    if options.raw or template is None:
        if not prompt:
            raise RequestError("The prompt is empty.", param="prompt")
        return tokenizer.encode(prompt)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": prompt})
    return encode_chat(tokenizer, template, messages, add_generation_prompt=True)


def _request(model: ServedModel, scheduler: Scheduler, token_ids: list[int], options: LocalOptions) -> GenerationRequest:
    limits = scheduler.limits
    room = limits.max_model_len - len(token_ids)
    max_tokens = options.max_tokens or room
    if room < 1 or max_tokens > room:
        raise RequestError(
            f"The prompt has {len(token_ids)} tokens and {max(max_tokens, 1)} are asked for; this model takes "
            f"{limits.max_model_len} in all.",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        )
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    sampling.validate(limits.vocab_size)
    return GenerationRequest(
        request_id=1,
        tenant_id="local",
        priority=0,
        prompt_token_ids=token_ids,
        sampling=sampling,
        stopping=StopConditions(max_tokens),
        arrival_ns=time.monotonic_ns(),
        deadline_ns=0,
        cache_salt="",
        reply_ring=0,
        model_id=model.manifest.name,
    )


def _events(scheduler: Scheduler, executor: Executor, request: GenerationRequest) -> Iterator[TokenEvent]:
    scheduler.add(request, time.monotonic_ns())
    while scheduler.has_work:
        plan = scheduler.schedule(time.monotonic_ns())
        scheduler.apply(plan, executor.execute(plan), time.monotonic_ns())
        for events in scheduler.take_events().values():
            yield from events


def _print_answer(
    scheduler: Scheduler,
    executor: Executor,
    request: GenerationRequest,
    detokenizer: IncrementalDetokenizer,
    *,
    show_stats: bool,
) -> None:
    started = time.monotonic()
    first: float | None = None
    for event in _events(scheduler, executor, request):
        if event.finish_reason is FinishReason.ERROR:
            raise RequestError(event.error_message, code=ErrorCode.from_wire(event.error_code))
        shown = event.token_ids[:-1] if event.finish_reason is FinishReason.STOP else event.token_ids
        if event.token_ids and first is None:
            first = time.monotonic()
        sys.stdout.write(detokenizer.push(shown))
        sys.stdout.flush()
        if event.finish_reason is not None:  # the first token's event carries `usage` too
            sys.stdout.write(detokenizer.finish() + "\n")
            if show_stats and event.usage is not None:
                _print_stats(event.usage, started, first or time.monotonic())


def _print_stats(usage: Usage, started: float, first: float) -> None:
    ended = time.monotonic()
    num_tokens = usage.num_output_tokens
    output = "output 1 token"  # which has no speed
    if num_tokens > 1:
        output = f"output {num_tokens} tokens at {(num_tokens - 1) / (ended - first):.1f} tokens/s"
    first_ms = 1e3 * (first - started)
    sys.stderr.write(f"prompt {usage.num_prompt_tokens} tokens, first token after {first_ms:.0f} ms; {output}\n")
