"""Are answers right: shape, usage, finish reason, repeatable greedy text, exact stop strings, whole characters?

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
"""

import asyncio

from headrace.loadtest.audit.answers import Answer, expect_answer, judge_refusal, read_answer
from headrace.loadtest.audit.checks.fields import LOOP, ask_field
from headrace.loadtest.audit.findings import CannotJudge, Finding, failed, passed, quote, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import REFERENCE_TOKENS, STORY, Session, Surface
from headrace.loadtest.audit.streams import read_stream

STOP_CHARS = 5
MAX_SPLIT_SWEEP = 6
NUM_NEIGHBOURS = 8
BROKEN = "�"
MULTI_BYTE = {
    "chat": ("Repeat this line exactly: 🫠🥹龜🎉 你好，世界", "Answer with ten different emoji and nothing else."),
    "text": ("🎉🎊🥳🎂🎁🎈🎉🎊🥳🎂🎁🎈🎉🎊🥳🎂🎁🎈🎉🎊🥳", "你好，世界。你好，世界。你好，世界。你好，"),
}
FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")


@check(
    "answer.shape",
    "answers have the API's shape",
    Group.ANSWERS,
    weight=2,
    requests=0,
    hint="SDKs validate id, object, created, model, choices and usage.",
)
async def shape(session: Session) -> Finding:
    """Of every surface that answers."""
    session.main_surface()
    wrong = []
    for surface in session.surfaces():
        answer = session.need(surface).answer
        wanted = "chat.completion" if surface is Surface.CHAT else "text_completion"
        if answer.object != wanted:
            wrong.append(f"{surface.value}: object is {answer.object!r}, not {wanted!r}")
        wrong += [f"{surface.value}: no {name}" for name in ("id", "model", "created") if not getattr(answer, name)]
        if not answer.has_usage:
            wrong.append(f"{surface.value}: no usage")
        if surface is Surface.CHAT and answer.choices[0].role != "assistant":
            wrong.append(f"chat: role is {answer.choices[0].role!r}")
        if answer.finish_reason not in FINISH_REASONS:
            wrong.append(f"{surface.value}: finish_reason is {answer.finish_reason!r}")
    return failed("; ".join(wrong)) if wrong else passed(f"on {' and '.join(s.path for s in session.surfaces())}")


@check(
    "answer.usage",
    "usage adds up and counts the tokens",
    Group.ANSWERS,
    weight=2,
    requests=0,
    hint="total_tokens is prompt_tokens + completion_tokens; an answer cut by max_tokens has exactly so many.",
)
async def usage(session: Session) -> Finding:
    """Of the reference answers."""
    session.main_surface()
    for surface in session.surfaces():
        finding = judge_usage(session.need(surface).answer, REFERENCE_TOKENS)
        if finding is not None:
            return failed(f"{surface.value}: {finding}")
    return passed(", ".join(f"{s.value} {session.need(s).answer.usage.shown()}" for s in session.surfaces()))


def judge_usage(answer: Answer, limit: int) -> str | None:
    """What is wrong, or None."""
    numbers = answer.usage
    if numbers.prompt_tokens is None or numbers.completion_tokens is None or numbers.total_tokens is None:
        return f"numbers are missing: {numbers.shown()}"
    if numbers.prompt_tokens + numbers.completion_tokens != numbers.total_tokens or numbers.prompt_tokens < 1:
        return f"does not add up: {numbers.shown()}"
    if answer.finish_reason == "length" and numbers.completion_tokens != limit:
        return f"finish_reason length at {numbers.completion_tokens} tokens, the limit was {limit}"
    return None


@check(
    "answer.finish-length",
    "a cut answer says finish_reason length",
    Group.ANSWERS,
    weight=2,
    requests=1,
    hint='Clients continue or warn on "length"; "stop" hides that text is missing.',
)
async def finish_length(session: Session) -> Finding:
    """Three tokens of a long answer."""
    surface = session.main_surface()
    answer = read_answer(await ask_field(session, surface, max_tokens=3))
    if session.need(surface).answer.usage.completion_tokens in (1, 2):
        raise CannotJudge("the model ends by itself at once")
    return (
        passed("length")
        if answer.finish_reason == "length"
        else failed(f"finish_reason {answer.finish_reason!r} after 3 tokens")
    )


@check(
    "answer.greedy-repeats",
    "temperature 0 repeats, alone",
    Group.ANSWERS,
    weight=3,
    requests=5,
    hint="Prefix reuse or kernels chosen by shape may flip close calls: compare cold and warm answers (DET-01).",
)
async def greedy_repeats(session: Session) -> Finding:
    """Two more prompts, each twice in a row (new, then perhaps remembered), and the reference once more after them."""
    surface = session.main_surface()
    reference = session.need(surface)
    if not reference.is_stable:
        return failed("the first two answers to one prompt differ")
    last = session.surfaces()[-1]
    for where, prompt in ((last, MULTI_BYTE[last.value][0]), (surface, LOOP[surface.value])):
        first = read_answer(await ask_field(session, where, prompt)).text
        again = read_answer(await ask_field(session, where, prompt)).text
        if again != first:
            return failed(f"{quote(prompt, 30)} gave {quote(first)}, and at once again {quote(again)}")
    later = read_answer(await ask_field(session, surface)).text
    if later != reference.answer.text:
        return failed(f"the same prompt gave {quote(reference.answer.text)}, and after others {quote(later)}")
    return passed("3 prompts, each answered equally every time")


@check(
    "answer.greedy-under-load",
    "temperature 0 repeats while 8 others run",
    Group.ANSWERS,
    weight=3,
    requests=NUM_NEIGHBOURS + 2,
    hint="Answers depend on neighbours in the batch: use kernels that do not change with the batch's size (DET-04).",
)
async def greedy_under_load(session: Session) -> Finding:
    """Twice among eight others of mixed lengths."""
    surface = session.main_surface()
    reference = session.need_stable(surface)
    others = [
        ask_field(session, surface, STORY[surface.value] + " big" * (5 * number), max_tokens=24 + 4 * number)
        for number in range(NUM_NEIGHBOURS)
    ]
    replies = await asyncio.gather(*others[:4], ask_field(session, surface), *others[4:], ask_field(session, surface))
    texts = [read_answer(replies[4]).text, read_answer(replies[-1]).text]
    different = next((text for text in texts if text != reference.text), None)
    if different is not None:
        return failed(f"among others {quote(different)}, alone {quote(reference.text)}")
    return passed(f"2 of 2 equal among {NUM_NEIGHBOURS} others")


def stop_and_rest(text: str) -> tuple[str, str]:
    """A stop string from the middle of a text, and what must remain. Raise CannotJudge for a short or uniform text."""
    for start in range(len(text) // 2, len(text) - STOP_CHARS):
        stop = text[start : start + STOP_CHARS]
        if stop.strip() == stop and text.find(stop) == start and text[:start].strip():
            return stop, text[:start]
    raise CannotJudge(f"the answer is too short or too uniform for a stop string: {quote(text)}")


def judge_stop(text: str, finish_reason: str | None, stop: str, wanted: str, full: str) -> Finding:
    """The text ends exactly before the stop string, which never shows."""
    if text == full or stop in text:
        return failed(f"{quote(stop)} did not stop: {quote(text)}")
    if text != wanted:
        return failed(f"stopped by {quote(stop)} at {quote(text[-30:])}, right is {quote(wanted[-30:])}")
    if finish_reason != "stop":
        return failed(f"finish_reason is {finish_reason!r}, not 'stop'")
    return passed(f"{quote(stop)} stopped after {quote(wanted[-30:])}")


@check(
    "answer.stop",
    "a stop string ends the text exactly before it",
    Group.ANSWERS,
    weight=3,
    requests=1,
    hint="Match stop strings on text, not tokens, and cut at the exact character (STP-04).",
)
async def stop_whole(session: Session) -> Finding:
    """The stop string lies across tokens of a known text."""
    surface = session.main_surface()
    reference = session.need_stable(surface)
    stop, wanted = stop_and_rest(reference.text)
    answer = read_answer(await ask_field(session, surface, stop=[stop]))
    return judge_stop(answer.text, answer.finish_reason, stop, wanted, reference.text)


@check(
    "answer.stop-stream",
    "no piece of a stop string leaks into a stream",
    Group.ANSWERS,
    weight=3,
    requests=1,
    hint="Hold back text that may become a stop string until it is decided (STP-01).",
)
async def stop_streamed(session: Session) -> Finding:
    """As answer.stop, streamed."""
    surface = session.main_surface()
    reference = session.need_stable(surface)
    stop, wanted = stop_and_rest(reference.text)
    view = read_stream(await ask_field(session, surface, stop=[stop], stream=True))
    reasons = view.choices[0].finish_reasons if 0 in view.choices else []
    return judge_stop(view.text, reasons[-1] if reasons else None, stop, wanted, reference.text)


@check(
    "answer.stop-absent",
    "a stop string that never comes changes nothing",
    Group.ANSWERS,
    weight=1,
    requests=1,
    hint="Text held back for a possible stop must be sent at the end (STP-08).",
)
async def stop_absent(session: Session) -> Finding:
    """Same text, same usage."""
    surface = session.main_surface()
    reference = session.need_stable(surface)
    answer = read_answer(await ask_field(session, surface, stop=["<never here>", "also never"]))
    if answer.text != reference.text or answer.usage.completion_tokens != reference.usage.completion_tokens:
        return failed(f"with stop {quote(answer.text[-40:])}, without {quote(reference.text[-40:])}")
    return passed("the same text and usage")


async def _multi_byte(session: Session, surface: Surface) -> tuple[str, Answer]:
    """A prompt whose answer has characters of several bytes, and that answer.

    One without U+FFFD where there is one: models write bytes that are no text, and a server is not to blame for those.
    """
    session.need_stable(surface)
    broken = None
    for prompt in MULTI_BYTE[surface.value]:
        answer = expect_answer(await ask_field(session, surface, prompt, max_tokens=24), "an emoji prompt")
        if BROKEN in answer.text.removesuffix(BROKEN):
            broken = broken or (prompt, answer)
        elif any(ord(character) > 0x7F for character in answer.text):
            return prompt, answer
    if broken is None:
        raise CannotJudge("the model wrote nothing beyond ASCII")
    return broken


@check(
    "answer.utf8-stream",
    "characters of several tokens stream whole",
    Group.ANSWERS,
    weight=3,
    requests=8,
    hint="Hold back incomplete UTF-8 until the next token completes it (UTF-01).",
)
async def utf8_streamed(session: Session) -> Finding:
    """Emoji and CJK: no U+FFFD in any delta, and the deltas joined are the whole answer."""
    reasons = []
    for surface in reversed(session.surfaces()):  # completions continue such text most reliably
        try:
            prompt, answer = await _multi_byte(session, surface)
        except CannotJudge as reason:
            reasons.append(f"{surface.value}: {reason}")
            continue
        view = read_stream(await ask_field(session, surface, prompt, max_tokens=24, stream=True))
        deltas = view.choices[0].deltas if 0 in view.choices else []
        again = expect_answer(await ask_field(session, surface, prompt, max_tokens=24), "an emoji prompt")
        if again.text != answer.text:
            reasons.append(f"{surface.value}: greedy answers to it differ from one time to the next")
            # The same U+FFFD in the answer that was not streamed are bytes that the model itself wrote wrongly.
            if BROKEN not in "".join(deltas).removesuffix(BROKEN) or "".join(deltas) == again.text:
                continue
        return judge_utf8(deltas, answer.text)
    return skipped("; ".join(reasons) or "nothing generates")


def judge_utf8(deltas: list[str], whole: str) -> Finding:
    """One U+FFFD at the very end may stand for a character that max_tokens cut."""
    joined = "".join(deltas)
    if BROKEN in joined.removesuffix(BROKEN):
        return failed(f"U+FFFD within the stream: {quote(joined)}")
    if joined.removesuffix(BROKEN) != whole.removesuffix(BROKEN):
        return failed(f"streamed {quote(joined)}, whole {quote(whole)}")
    return passed(f"{len(deltas)} deltas make {quote(whole)}")


@check(
    "answer.utf8-cut",
    "a limit inside a character does no harm",
    Group.ANSWERS,
    weight=1,
    requests=4 + MAX_SPLIT_SWEEP,
    hint="Drop the incomplete tail or send one U+FFFD for it (UTF-02).",
)
async def utf8_cut(session: Session) -> Finding:
    """max_tokens 1 to 6 over text of many-byte characters."""
    for surface in reversed(session.surfaces()):
        try:
            prompt, answer = await _multi_byte(session, surface)
        except CannotJudge:
            continue
        for limit in range(1, MAX_SPLIT_SWEEP + 1):
            reply = await ask_field(session, surface, prompt, max_tokens=limit)
            if reply.status != 200:
                return failed(f"max_tokens {limit}: {judge_refusal(reply, 'max_tokens').evidence}")
            text = read_answer(reply).text
            if BROKEN in text.removesuffix(BROKEN):
                return failed(f"max_tokens {limit} gave {quote(text)}")
        return passed(f"max_tokens 1 to {MAX_SPLIT_SWEEP} of {quote(answer.text[:20])}")
    return skipped("the model wrote nothing beyond ASCII")
