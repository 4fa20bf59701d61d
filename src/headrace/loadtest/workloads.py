"""From a run's settings to its plan: what is asked, how long, in which order, and when.

Owns: make_plan, the requests of each workload. Runs in: load tool. Must not know: HTTP, how load is sent or measured.
Lengths, order and times follow from the seed alone; texts from the seed and the salt.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from headrace.loadtest.arrivals import due_times
from headrace.loadtest.conversations import draft_conversations, turns_of
from headrace.loadtest.lengths import SHAPES, Lengths, cut_to_context, draw_lengths, scaled
from headrace.loadtest.mixes import MixClass, head_of_line_classes, parse_mix
from headrace.loadtest.own_prompts import draft_batch, draft_sharegpt
from headrace.loadtest.plan import LoadPlan, PlannedRequest, api_path
from headrace.loadtest.prompts import ASSUMED, Calibration, PromptWriter
from headrace.loadtest.records import RunSettings
from headrace.loadtest.request_drafts import (
    CLASS_HEADERS,
    QUESTIONS_PER_DOCUMENT,
    REPEATS_PROMPTS,
    SALT,
    RequestDraft,
    WorkloadError,
    count_option,
    request_body,
)
from headrace.loadtest.traces import TraceEntry, read_trace
from headrace.loadtest.workload_settings import (
    DEFAULT_DOCUMENT,
    DEFAULT_FIXED,
    FINITE,
    OWN_PROMPTS,
    PREFIXED,
    WORKLOAD_FORMS,
    WORKLOAD_OPTIONS,
    complete_settings,
    kind_of,
)

__all__ = ["WORKLOAD_FORMS", "WORKLOAD_OPTIONS", "WorkloadError", "make_plan"]

DOCUMENT_SPREAD = 0.25  # documents are this share shorter or longer than asked, evenly
QUESTION_TOKENS = 24
MAX_TRACE_ENTRIES = 1_000_000


def make_plan(
    settings: RunSettings,
    *,
    headers: Mapping[str, str] | None = None,
    calibration: Calibration = ASSUMED,
    context_tokens: int | None = None,
    opens_new_connections: bool = False,
    max_outstanding: int | None = None,
) -> LoadPlan:
    """The plan of a run. Its requests are written as they are asked for, so that a long run costs no memory.

    `context_tokens`: the model's limit; drawn lengths are cut to it (the plan's settings name it), fixed ones must fit. The
    plan's settings are complete: see complete_settings. Raises WorkloadError, TraceError or ValueError, in words for the user.
    """
    path = api_path(settings.api)
    settings = complete_settings(settings, calibration, context_tokens)
    kind, argument = kind_of(settings)
    if settings.num_requests is None and settings.duration_seconds is None and kind not in FINITE:
        raise WorkloadError("the run needs a number of requests or a duration")
    writer = PromptWriter(f"{settings.seed}:{settings.extra.get(SALT, '')}", calibration)
    drafts = _drafts(settings, writer, "", context_tokens)
    first = next(drafts, None)  # a missing file or a wrong class shows here, and not when the load has begun
    if first is None:
        raise WorkloadError(f"workload {settings.workload!r}: no request in it")
    plan = LoadPlan(
        settings=settings,
        requests=_numbered(itertools.chain([first], drafts), _due_times(settings, kind, argument)),
        path=path,
        headers=dict(headers or {}),
        opens_new_connections=opens_new_connections,
    )
    return plan if max_outstanding is None else msgspec.structs.replace(plan, max_outstanding=max_outstanding)


def _due_times(settings: RunSettings, kind: str, argument: str) -> Iterator[float] | None:
    """Due times of conversations. The rate is of requests: conversations of n turns begin at an n-th of it."""
    if settings.arrival == "trace":
        if kind != "trace":
            raise WorkloadError("arrival 'trace' needs a workload 'trace:FILE'")
        return due_times(settings, [entry.at for entry in _entries(settings, argument)])
    if kind == "chat" and settings.rate is not None:
        return due_times(msgspec.structs.replace(settings, rate=settings.rate / turns_of(settings)))
    return due_times(settings)


def _numbered(drafts: Iterator[RequestDraft], times: Iterator[float] | None) -> Iterator[PlannedRequest]:
    index = itertools.count()
    dues: Iterator[float | None] = itertools.repeat(None) if times is None else times
    for due, draft in zip(dues, drafts, strict=False):
        first = next(index)
        turns = tuple(_planned(turn, next(index), None) for turn in draft.then)
        yield msgspec.structs.replace(_planned(draft, first, due), then=turns)


def _planned(draft: RequestDraft, index: int, due: float | None) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        due=due,
        group=draft.group,
        body=draft.body,
        target_prompt_tokens=draft.target_prompt_tokens,
        target_output_tokens=draft.target_output_tokens,
        think_seconds=draft.think_seconds,
        headers=draft.headers,
    )


def _drafts(settings: RunSettings, writer: PromptWriter, key: str, context_tokens: int | None) -> Iterator[RequestDraft]:
    """The requests of completed settings. `key` keeps the classes of a mix apart."""
    kind, argument = kind_of(settings)
    if kind in SHAPES:
        lengths = draw_lengths(SHAPES[kind], settings.length_scale, f"{settings.seed}:{key}:lengths")
        return _of_lengths(settings, (cut_to_context(item, context_tokens) for item in lengths), writer, key)
    if kind == "fixed":
        return _of_lengths(settings, itertools.repeat(_fitting(settings, DEFAULT_FIXED, context_tokens)), writer, key)
    if kind == "chat":
        return draft_conversations(settings, writer, key, context_tokens)
    if kind == "long-document":
        return _documents(settings, writer, key, context_tokens)
    if kind == "trace":
        return _of_trace(settings, _entries(settings, argument), writer, context_tokens)
    if kind in OWN_PROMPTS:
        return _own(settings, kind, Path(argument))
    classes = parse_mix(argument) if kind == "mix" else head_of_line_classes(settings.prompt_tokens, settings.output_tokens)
    return _mixed(settings, classes, writer, context_tokens)


def _fitting(settings: RunSettings, default: Lengths, context_tokens: int | None) -> Lengths:
    lengths = Lengths(settings.prompt_tokens or default.prompt_tokens, settings.output_tokens or default.output_tokens)
    if context_tokens is not None and sum(lengths) > context_tokens:
        told = f"prompts of {lengths.prompt_tokens} and answers of {lengths.output_tokens} tokens"
        raise WorkloadError(f"{told} do not fit the model's context of {context_tokens}")
    return lengths


def _of_lengths(settings: RunSettings, lengths: Iterator[Lengths], writer: PromptWriter, key: str) -> Iterator[RequestDraft]:
    for number, (prompt, output) in enumerate(lengths):
        text = writer.prompt(prompt, key, number, shared_tokens=settings.shared_prefix_tokens)
        yield RequestDraft(body=request_body(settings, text, output), target_prompt_tokens=prompt, target_output_tokens=output)


def _documents(settings: RunSettings, writer: PromptWriter, key: str, context_tokens: int | None) -> Iterator[RequestDraft]:
    """A document and a question behind it; so many questions in a row on one document."""
    num_questions = count_option(settings, QUESTIONS_PER_DOCUMENT, 1)
    wanted = _fitting(settings, DEFAULT_DOCUMENT, context_tokens)
    source = random.Random(f"{settings.seed}:{key}:documents")  # noqa: S311 - not for secrets
    for number in itertools.count():
        tokens = max(1, round(wanted.prompt_tokens * source.uniform(1 - DOCUMENT_SPREAD, 1 + DOCUMENT_SPREAD)))
        lengths = cut_to_context(Lengths(tokens, wanted.output_tokens), context_tokens)
        question_tokens = min(QUESTION_TOKENS, max(1, lengths.prompt_tokens // 2))
        document = writer.prompt(
            lengths.prompt_tokens - question_tokens, key, "document", number, shared_tokens=settings.shared_prefix_tokens
        )
        for place in range(num_questions):
            text = f"{document}\n\n{writer.part(question_tokens, key, 'question', number, place)}"
            yield RequestDraft(
                body=request_body(settings, text, lengths.output_tokens),
                target_prompt_tokens=lengths.prompt_tokens,
                target_output_tokens=lengths.output_tokens,
            )


def _entries(settings: RunSettings, argument: str) -> Iterator[TraceEntry]:
    limit = MAX_TRACE_ENTRIES if settings.num_requests is None else min(settings.num_requests, MAX_TRACE_ENTRIES)
    return read_trace(Path(argument), limit, settings.seed)


def _of_trace(
    settings: RunSettings, entries: Iterator[TraceEntry], writer: PromptWriter, context_tokens: int | None
) -> Iterator[RequestDraft]:
    """Lengths as recorded (and scaled); prompt parts of one hash id are one text, scaled as well.

    With CLASS_HEADERS each request says whose it was, in the words that Headrace understands.
    """
    names_class = count_option(settings, CLASS_HEADERS, 0, least=0) > 0
    for number, entry in enumerate(entries):
        recorded = Lengths(entry.prompt_tokens, entry.output_tokens)
        lengths = cut_to_context(scaled(recorded, settings.length_scale), context_tokens)
        text = _trace_text(entry, lengths.prompt_tokens, settings.length_scale, writer, number)
        body = request_body(settings, text, lengths.output_tokens)
        headers: dict[str, str] = {}
        if names_class:
            headers = _class_headers(entry)
            body |= {"priority": entry.priority} if entry.priority else {}
        yield RequestDraft(
            body=body,
            target_prompt_tokens=lengths.prompt_tokens,
            target_output_tokens=lengths.output_tokens,
            group=entry.group,
            headers=headers,
        )


def _class_headers(entry: TraceEntry) -> dict[str, str]:
    if not entry.service_class:
        raise WorkloadError("the trace knows no classes to send: only records of `headrace serve --record` do")
    return {"x-headrace-class": entry.service_class, "x-headrace-tenant": entry.tenant}


def _trace_text(entry: TraceEntry, prompt_tokens: int, scale: float, writer: PromptWriter, number: int) -> str:
    """Parts one after the other until the prompt is long enough; the last one is cut, so that what is equal stays equal."""
    if not entry.part_ids:
        return writer.prompt(prompt_tokens, "trace", number)
    part_tokens = entry.part_tokens * scale
    left = writer.calibration.num_words(max(1.0, prompt_tokens - writer.calibration.overhead_tokens))
    words: list[str] = []
    for part in entry.part_ids:
        words += writer.part(part_tokens, "part", part).split(" ")[: left - len(words)]
        if len(words) >= left:
            break
    if len(words) < left:
        words += writer.part(prompt_tokens, "rest", number).split(" ")[: left - len(words)]
    return " ".join(words)


def _own(settings: RunSettings, kind: str, path: Path) -> Iterator[RequestDraft]:
    read: Callable[[RunSettings, Path], Iterator[RequestDraft]] = draft_batch if kind == "prompts" else draft_sharegpt
    repeats = count_option(settings, REPEATS_PROMPTS, 0, least=0) > 0
    while True:
        num_read = 0
        for draft in read(settings, path):
            num_read += 1
            yield draft
        if num_read == 0 or not repeats:
            return


def _mixed(
    settings: RunSettings, classes: tuple[MixClass, ...], writer: PromptWriter, context_tokens: int | None
) -> Iterator[RequestDraft]:
    """Each next request is of a class drawn by the weights. A class that ends (one's own prompts) ends the mix."""
    sources = [_class_drafts(settings, item, writer, context_tokens) for item in classes]
    choice = random.Random(f"{settings.seed}:mix")  # noqa: S311 - not for secrets
    weights = [item.weight for item in classes]
    while True:
        place = choice.choices(range(len(classes)), weights=weights)[0]
        draft = next(sources[place], None)
        if draft is None:
            return
        yield _of_class(draft, classes[place])


def _of_class(draft: RequestDraft, item: MixClass) -> RequestDraft:
    group = f"{item.name}/{draft.group}" if draft.group else item.name
    turns = tuple(_of_class(turn, item) for turn in draft.then)
    return msgspec.structs.replace(draft, group=group, headers=item.headers, then=turns)


def _class_drafts(
    settings: RunSettings, item: MixClass, writer: PromptWriter, context_tokens: int | None
) -> Iterator[RequestDraft]:
    """A class as a workload of its own. Of the run's lengths only scale and shared prefix reach it, where it can have them."""
    try:
        own = complete_settings(_class_settings(settings, item), writer.calibration, context_tokens)
        drafts = _drafts(own, writer, item.name, context_tokens)
        first = next(drafts, None)
    except WorkloadError as error:
        raise WorkloadError(f"class {item.name!r}: {error}") from None
    if first is None:
        raise WorkloadError(f"class {item.name!r}: no request in it")
    return itertools.chain([first], drafts)


def _class_settings(settings: RunSettings, item: MixClass) -> RunSettings:
    own = msgspec.structs.replace(
        settings, workload=item.workload, prompt_tokens=item.prompt_tokens, output_tokens=item.output_tokens, extra=item.extra
    )
    kind, _ = kind_of(own)
    if kind in ("mix", "hol", "trace"):
        raise WorkloadError(f"a workload {kind!r} cannot be part of a mix")
    run_scale = settings.length_scale if kind in SHAPES else 1.0
    return msgspec.structs.replace(
        own,
        length_scale=run_scale if item.length_scale is None else item.length_scale,
        shared_prefix_tokens=settings.shared_prefix_tokens if kind in PREFIXED else 0,
    )
