"""What may be asked as a workload, and what a run's settings become when nothing is left open.

Owns: the names and options of workloads, complete_settings. Runs in: load tool. Must not know: texts, arrival times, HTTP.
"""

import itertools
import secrets
from pathlib import Path

import msgspec

from headrace.loadtest.lengths import SHAPES, Lengths
from headrace.loadtest.prompts import Calibration
from headrace.loadtest.records import RunSettings
from headrace.loadtest.request_drafts import (
    CALIBRATION,
    CLASS_HEADERS,
    CONTEXT_TOKENS,
    LENGTH_SOURCE,
    NUM_TENANTS,
    QUESTIONS_PER_DOCUMENT,
    REPEATS_PROMPTS,
    SALT,
    SYSTEM_TOKENS,
    THINK_SECONDS,
    TURNS,
    WorkloadError,
)

DEFAULT_FIXED = Lengths(256, 64)
DEFAULT_DOCUMENT = Lengths(4096, 128)

# What may be given as `workload`, for --help; [in brackets]: may be left out.
WORKLOAD_FORMS: dict[str, str] = {
    "fixed[:PROMPT,OUTPUT]": "every prompt and answer of one length",
    "azure-conversation": "lengths of Azure's 2023 conversation trace",
    "azure-code": "lengths of Azure's 2023 code completion trace: long prompts, short answers",
    "mooncake-conversation": "lengths of Mooncake's conversation trace: very long prompts",
    "chat[:TURNS]": "conversations with a system prompt for each tenant, a growing history and time to think",
    "long-document[:PROMPT,OUTPUT]": "questions on long documents",
    "hol": "steady streams and one long prompt in ten requests, to provoke head-of-line blocking",
    "mix:NAME=WEIGHT:WORKLOAD;...": "several of these in one run, or mix:FILE.toml",
    "trace:FILE": "a recorded trace (Azure's CSV, Mooncake's JSONL, a file of `headrace serve --record`, a saved report); its "
    "times with arrival trace",
    "prompts:FILE": "one's own requests, OpenAI's batch format",
    "sharegpt:FILE": "one's own conversations, ShareGPT's format",
}
WORKLOAD_OPTIONS: dict[str, str] = {
    TURNS: "chat: requests of one conversation",
    THINK_SECONDS: "chat: mean pause between an answer and the next turn",
    SYSTEM_TOKENS: "chat: length of a tenant's system prompt",
    NUM_TENANTS: "chat: tenants, each with its own system prompt; shares of traffic fall as 1/rank",
    QUESTIONS_PER_DOCUMENT: "long-document: requests in a row on one document",
    CLASS_HEADERS: "trace: 1 sends each request's recorded class, tenant and priority",
    REPEATS_PROMPTS: "prompts, sharegpt: 1 begins anew at the file's end",
}
OWN_PROMPTS = frozenset({"prompts", "sharegpt"})
FINITE = frozenset({"trace", *OWN_PROMPTS})
PREFIXED = frozenset({*SHAPES, "fixed", "long-document"})  # kinds that can share a prefix
_KINDS = frozenset({*SHAPES, *FINITE, "fixed", "chat", "long-document", "hol", "mix"})
_SHORT_NAMES = {"azure-conv": "azure-conversation", "mooncake-conv": "mooncake-conversation"}
_NEEDING_MORE = frozenset({"mix", *FINITE})
_TAKING_MORE = frozenset({*_NEEDING_MORE, "fixed", "chat", "long-document"})
_SCALED = frozenset({*SHAPES, "trace", "mix"})  # kinds whose lengths the scale multiplies
_WITHOUT_LENGTHS = frozenset({*SHAPES, "trace", "mix"})
_OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "chat": (TURNS, THINK_SECONDS, SYSTEM_TOKENS, NUM_TENANTS),
    "long-document": (QUESTIONS_PER_DOCUMENT,),
    "trace": (CLASS_HEADERS,),
    "prompts": (REPEATS_PROMPTS,),
    "sharegpt": (REPEATS_PROMPTS,),
}
_ALL_OPTIONS = frozenset(itertools.chain(*_OPTIONS_OF.values()))


def kind_of(settings: RunSettings) -> tuple[str, str]:
    """The workload's kind, and what stands behind its colon ("" for nothing). WorkloadError for one that is not known."""
    kind, _, argument = settings.workload.partition(":")
    kind = _SHORT_NAMES.get(kind, kind)
    if kind not in _KINDS:
        raise WorkloadError(f"workload is {settings.workload!r}; it must be one of {', '.join(WORKLOAD_FORMS)}")
    if kind in _NEEDING_MORE and not argument:
        raise WorkloadError(f"workload {kind!r} needs more: {next(form for form in WORKLOAD_FORMS if form.startswith(kind))}")
    if argument and kind not in _TAKING_MORE:
        raise WorkloadError(f"workload {kind!r} takes nothing behind a colon, not {argument!r}")
    return kind, argument


def complete_settings(settings: RunSettings, calibration: Calibration, context_tokens: int | None) -> RunSettings:
    """The settings with everything in them that was left open: lengths, turns, salt, where lengths and their counts come from.

    Completing them once more changes nothing, so that saved settings repeat a run to the letter. WorkloadError for what makes
    no sense, options that the workload would ignore among it.
    """
    kind, argument = kind_of(settings)
    _refuse_ignored(settings, kind)
    settings = _unfolded(settings, kind, argument)
    is_salted = settings.is_salted and kind not in OWN_PROMPTS
    extra = dict(settings.extra)
    if is_salted:
        extra.setdefault(SALT, secrets.token_hex(4))
    extra[LENGTH_SOURCE] = _length_source(settings, kind, argument)
    if kind not in OWN_PROMPTS:
        extra[CALIBRATION] = calibration.source
        if context_tokens is not None:
            extra[CONTEXT_TOKENS] = str(context_tokens)
    return msgspec.structs.replace(settings, extra=extra, is_salted=is_salted)


def _refuse_ignored(settings: RunSettings, kind: str) -> None:
    if not 0 < settings.length_scale < float("inf"):
        raise WorkloadError(f"the scale of lengths is {settings.length_scale}; it must be a positive number")
    if settings.length_scale != 1.0 and kind not in _SCALED:
        raise WorkloadError(f"workload {kind!r} has no lengths to scale: give the lengths themselves")
    if settings.shared_prefix_tokens < 0:
        raise WorkloadError(f"a shared prefix has at least 0 tokens, not {settings.shared_prefix_tokens}")
    if settings.shared_prefix_tokens and kind not in PREFIXED and kind not in ("mix", "hol"):
        raise WorkloadError(f"workload {kind!r} cannot have a shared prefix put before its prompts")
    if ignored := (_ALL_OPTIONS & settings.extra.keys()) - set(_OPTIONS_OF.get(kind, ())):
        raise WorkloadError(f"workload {kind!r} does not know {', '.join(sorted(ignored))}")
    for name, value in (("prompt", settings.prompt_tokens), ("output", settings.output_tokens)):
        if value is not None and value < 1:
            raise WorkloadError(f"{name} lengths must be at least 1 token, not {value}")
    if kind in _WITHOUT_LENGTHS and (settings.prompt_tokens or settings.output_tokens):
        raise WorkloadError(f"the lengths of workload {kind!r} are its own; the scale of lengths changes them")
    if kind in OWN_PROMPTS and settings.prompt_tokens:
        raise WorkloadError(f"the prompts of workload {kind!r} are as long as they are")


def _unfolded(settings: RunSettings, kind: str, argument: str) -> RunSettings:
    """What stands behind the colon of fixed, long-document and chat goes where the settings have a place for it."""
    if kind == "chat":
        if not argument:
            return settings
        if TURNS in settings.extra:
            raise WorkloadError(f"turns are given twice: {settings.workload!r} and {settings.extra[TURNS]}")
        return msgspec.structs.replace(settings, workload=kind, extra={**settings.extra, TURNS: argument})
    if kind not in ("fixed", "long-document"):
        return settings if argument else msgspec.structs.replace(settings, workload=kind)
    prompt, output = settings.prompt_tokens, settings.output_tokens
    lengths = DEFAULT_FIXED if kind == "fixed" else DEFAULT_DOCUMENT
    if argument:
        if prompt is not None or output is not None:
            raise WorkloadError(f"lengths are given twice: behind the colon of {settings.workload!r} and apart")
        lengths = _parse_lengths(argument, settings.workload)
    return msgspec.structs.replace(
        settings, workload=kind, prompt_tokens=prompt or lengths.prompt_tokens, output_tokens=output or lengths.output_tokens
    )


def _parse_lengths(text: str, workload: str) -> Lengths:
    prompt, _, output = text.partition(",")
    if not (prompt.strip().isdecimal() and output.strip().isdecimal() and int(prompt) > 0 and int(output) > 0):
        raise WorkloadError(f"{workload!r}: behind the colon stand two lengths in tokens, such as 512,64")
    return Lengths(int(prompt), int(output))


def _length_source(settings: RunSettings, kind: str, argument: str) -> str:
    scale = f", multiplied by {settings.length_scale:g}, shape kept" if settings.length_scale != 1.0 else ""
    if kind in SHAPES:
        return f"drawn from {SHAPES[kind].source}{scale}"
    if kind == "trace":
        return f"{Path(argument).name}{scale}"
    if kind == "mix":
        return f"by class{scale}"
    return "the file's own" if kind in OWN_PROMPTS else "given"
