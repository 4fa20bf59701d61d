"""What a reader must know before believing a run's figures, in words.

Owns: when a run is warned of, and how. Runs in: load tool. Must not know: how figures are computed or drawn.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.loadtest.records import Outcome, RequestRecord
from headrace.loadtest.results import RunResult
from headrace.loadtest.tokens import CountKind, TokenCounts
from headrace.loadtest.verdicts import milliseconds

MIN_SAMPLES = {"p90": 20, "p99": 200, "p99.9": 2000}  # two values beyond the percentile: fewer, and it is next to the maximum
SHORT_ANSWER_SHARE = 0.95  # mean output below this share of what was asked is warned of
PROMPT_DEVIATION_SHARE = 0.10
CACHED_SHARE = 0.05  # of salted prompts' tokens
LATE_START_SHARE = 0.05  # of median TTFT, that the p99 from due may exceed the p99 from send by
LATE_START_SECONDS = 0.010  # and at least this
EMPTY_EVENT_LEAD_SHARE = 0.20  # of median TTFT
EMPTY_EVENT_LEAD_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class WarningInputs:
    """One result and the measured records behind it. `token_counts` belong to `completed`, in order."""

    result: RunResult
    completed: Sequence[RequestRecord]
    token_counts: Sequence[TokenCounts]
    measured: Sequence[RequestRecord]


def run_warnings(inputs: WarningInputs) -> list[str]:
    """Sentences for people, loudest first. Empty when there is nothing to be wary of."""
    found = (
        _client(inputs),
        _counts(inputs),
        _mismatches(inputs),
        _without_text(inputs),
        _late_starts(inputs),
        _token_counts(inputs),
        _short_answers(inputs),
        _prompt_lengths(inputs),
        _cached(inputs),
        _few_samples(inputs),
        _empty_first_events(inputs),
    )
    return [sentence for sentence in found if sentence]


def _client(inputs: WarningInputs) -> str:
    client = inputs.result.client
    if not client.was_bottleneck:
        return ""
    return f"The client was the bottleneck, so that these are not figures of the server: {client.why or 'no reason recorded'}."


def _counts(inputs: WarningInputs) -> str:
    counts = inputs.result.requests
    if counts.offered == 0:
        return "No request was scheduled within the measured window."
    if counts.completed == 0:
        return f"None of {counts.offered} requests completed ({_errors(inputs)})."
    num_missing = counts.refused + counts.failed
    if num_missing == 0:
        return ""
    num_unfinished = sum(record.outcome is Outcome.UNFINISHED for record in inputs.measured)
    unfinished = f", {num_unfinished} of these unfinished when the run ended" if num_unfinished else ""
    return (
        f"{counts.refused} refused and {counts.failed} failed{unfinished}, of {counts.offered} offered ({_errors(inputs)}): "
        "latencies are of the others only; goodput counts all."
    )


def _errors(inputs: WarningInputs) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in list(inputs.result.errors.items())[:4])


def _mismatches(inputs: WarningInputs) -> str:
    number = inputs.result.usage_mismatches
    if number == 0:
        return ""
    return (
        f"In {number} of {len(inputs.completed)} answers the server's usage cannot be right: fewer tokens than events with "
        "text, or more than were asked for. They do not count towards goodput."
    )


def _without_text(inputs: WarningInputs) -> str:
    number = sum(not record.chunk_times for record in inputs.completed)
    return (
        f"{number} of {len(inputs.completed)} completed answers held no text at all: they have no latencies." if number else ""
    )


def _late_starts(inputs: WarningInputs) -> str:
    from_due, from_sent = inputs.result.ttft_from_due_seconds, inputs.result.ttft_seconds
    if from_due is None or from_due.p99 is None or from_sent.p99 is None or from_sent.p50 is None:
        return ""
    late = from_due.p99 - from_sent.p99
    if late <= max(LATE_START_SECONDS, LATE_START_SHARE * from_sent.p50):
        return ""
    return (
        f"Requests were sent late: counted from when they were due, TTFT p99 is {milliseconds(from_due.p99)} and not "
        f"{milliseconds(from_sent.p99)}. Goodput counts from due."
    )


def _token_counts(inputs: WarningInputs) -> str:
    kind = inputs.result.token_counts
    if kind == CountKind.CHUNKS.value:
        number = sum(record.output_tokens is None for record in inputs.completed)
        if number == 0:
            return ""  # a mismatch, told above
        return (
            f"{number} of {len(inputs.completed)} answers came without usage: each event with text counts as one token there, "
            "and an answer without streaming as none."
        )
    if kind == CountKind.APPORTIONED.value:
        pairs = [(item.total, len(item.per_chunk)) for item in inputs.token_counts if item.kind is CountKind.APPORTIONED]
        num_events = sum(events for _, events in pairs)
        mean = sum(total for total, _ in pairs) / num_events if num_events else 0.0
        return (
            f"In {len(pairs)} of {len(inputs.completed)} answers events held several tokens (mean {mean:.2f}): TBT shares them "
            "out by characters; TBT per chunk is as measured."
        )
    return ""


def _short_answers(inputs: WarningInputs) -> str:
    pairs = [
        (record.output_tokens, record.target_output_tokens)
        for record in inputs.completed
        if record.output_tokens is not None and record.target_output_tokens
    ]
    asked = sum(target for _, target in pairs)
    got = sum(tokens for tokens, _ in pairs)
    if not pairs or got >= SHORT_ANSWER_SHARE * asked:
        return ""
    why = (
        "the server may not know ignore_eos, or its context ended first"
        if inputs.result.settings.ignores_eos
        else "answers end where the model ends them"
    )
    return f"Answers are shorter than asked: {got / len(pairs):.0f} tokens in the mean, not {asked / len(pairs):.0f} ({why})."


def _prompt_lengths(inputs: WarningInputs) -> str:
    pairs = [
        (record.prompt_tokens, record.target_prompt_tokens)
        for record in inputs.completed
        if record.prompt_tokens is not None and record.target_prompt_tokens
    ]
    wanted = sum(target for _, target in pairs)
    got = sum(tokens for tokens, _ in pairs)
    if not pairs or abs(got - wanted) <= PROMPT_DEVIATION_SHARE * wanted:
        return ""
    return (
        f"Prompts had {got / len(pairs):.0f} tokens in the mean by the server's count, not the {wanted / len(pairs):.0f} meant."
    )


def _cached(inputs: WarningInputs) -> str:
    settings = inputs.result.settings
    pairs = [(record.cached_tokens or 0, record.prompt_tokens) for record in inputs.completed if record.prompt_tokens]
    total = sum(tokens for _, tokens in pairs)
    cached = sum(tokens for tokens, _ in pairs)
    if not total or cached <= CACHED_SHARE * total:
        return ""
    if settings.is_salted and settings.shared_prefix_tokens:
        return ""  # wanted
    why = "although they were salted" if settings.is_salted else "since they were not salted"
    return f"{cached / total:.0%} of prompt tokens came from the server's prefix cache, {why}: new prompts would wait longer."


def _few_samples(inputs: WarningInputs) -> str:
    count = inputs.result.ttft_seconds.count
    names = [name for name, least in MIN_SAMPLES.items() if 0 < count < least]
    if not names:
        return ""
    return (
        f"{count} requests are few: {', '.join(names)} of figures with one value a request are next to the maximum "
        f"({names[0]} needs {MIN_SAMPLES[names[0]]})."
    )


def _empty_first_events(inputs: WarningInputs) -> str:
    leads = [
        record.chunk_times[0] - record.first_event_at
        for record in inputs.completed
        if record.first_event_at is not None and record.chunk_times
    ]
    median_ttft = inputs.result.ttft_seconds.p50
    if not leads or median_ttft is None:
        return ""
    lead = statistics.median(leads)
    if lead <= max(EMPTY_EVENT_LEAD_SECONDS, EMPTY_EVENT_LEAD_SHARE * median_ttft):
        return ""
    return (
        f"The server sends an event without text {milliseconds(lead)} ahead of the first text: a tool that takes it for a "
        f"token would report a TTFT of {milliseconds(inputs.result.first_event_seconds.p50 or 0.0)}, "
        f"not {milliseconds(median_ttft)}."
    )
