"""Is each request field honoured, refused, or silently ignored? Sampling, lengths and prompts.

Owns: those checks and their judgements. Runs in: audit. Must not know: sockets.
Nothing here depends on how clever the model is: answers are compared with the server's own other answers.
"""

from typing import Any

from headrace.loadtest.audit.answers import Answer, expect_answer, judge_refusal, read_answer
from headrace.loadtest.audit.findings import CannotJudge, Finding, Outcome, failed, honoured, ignored, passed, quote, skipped
from headrace.loadtest.audit.registry import Group, check
from headrace.loadtest.audit.session import REFERENCE_TOKENS, STORY, Session, Surface
from headrace.loadtest.audit.wire import Reply

LOOP = {
    "chat": "Write the sentence 'The river flows.' fifty times and nothing else.",
    "text": " The river flows." * 12,
}
BIASED_IDS = (1000, 2000, 5000)
BIASED_TOKENS = 6
OBEY = "Implement the field, or refuse it with 400 and its name: a field that is silently ignored gives wrong results unseen."


async def ask_field(session: Session, surface: Surface, prompt: str = "", **fields: Any) -> Reply:
    """A generation with the field under test."""
    return await session.generate(surface, prompt, **fields)


def answered(replies: list[Reply], name: str) -> Finding | list[Answer]:
    """The answers, or the finding for the first reply that is none (a refusal of the field)."""
    for reply in replies:
        if reply.status != 200:
            return judge_refusal(reply, name)
    return [read_answer(reply) for reply in replies]


@check("field.max_tokens", "max_tokens limits the answer", Group.FIELDS, weight=3, requests=1, hint=OBEY)
async def max_tokens(session: Session) -> Finding:
    """Five tokens of a text known to be longer."""
    surface = session.main_surface()
    reference = session.need(surface).answer
    if reference.finish_reason != "length":
        raise CannotJudge(f"the model ended by itself within {REFERENCE_TOKENS} tokens")
    reply = await ask_field(session, surface, max_tokens=5)
    if reply.status != 200:
        return failed(f"refused: {reply.summary()}")
    return judge_length(read_answer(reply), 5)


@check(
    "field.max_completion_tokens", "max_completion_tokens wins over max_tokens", Group.FIELDS, weight=2, requests=1, hint=OBEY
)
async def max_completion_tokens(session: Session) -> Finding:
    """Five against twenty-four (LIM-14)."""
    if session.need(Surface.CHAT).answer.finish_reason != "length":
        raise CannotJudge(f"the model ended by itself within {REFERENCE_TOKENS} tokens")
    answers = answered(
        [await ask_field(session, Surface.CHAT, max_tokens=24, max_completion_tokens=5)], "max_completion_tokens"
    )
    return answers if isinstance(answers, Finding) else judge_length(answers[0], 5)


def judge_length(answer: Answer, wanted: int) -> Finding:
    """By usage where there is one, else by the finish reason."""
    got = answer.usage.completion_tokens
    if got is None:
        return skipped("no usage, so that tokens cannot be counted")
    if got == wanted:
        return honoured(f"{got} tokens, finish_reason {answer.finish_reason}")
    return ignored(f"{got} tokens came where {wanted} were the limit")


@check("field.temperature", "temperature above 0 draws anew", Group.FIELDS, weight=2, requests=3, hint=OBEY)
async def temperature(session: Session) -> Finding:
    """Three unseeded draws are not all the same."""
    surface = session.main_surface()
    replies = [await ask_field(session, surface, STORY[surface.value], temperature=1.4, max_tokens=24) for _ in range(3)]
    answers = answered(replies, "temperature")
    if isinstance(answers, Finding):
        return failed(answers.evidence)
    if len({answer.text for answer in answers}) > 1:
        return honoured("three draws at 1.4 gave different texts")
    return ignored(f"three draws at 1.4 gave the same text: {quote(answers[0].text)}")


@check("field.seed", "seed repeats a draw", Group.FIELDS, weight=2, requests=5, hint=OBEY)
async def seed(session: Session) -> Finding:
    """The same seed twice is equal; other seeds differ."""
    surface = session.main_surface()
    seeds = (11, 11, 12, 13, 14)
    replies = [
        await ask_field(session, surface, STORY[surface.value], temperature=1, seed=number, max_tokens=24) for number in seeds
    ]
    answers = answered(replies, "seed")
    return answers if isinstance(answers, Finding) else judge_seeds([answer.text for answer in answers])


def judge_seeds(texts: list[str]) -> Finding:
    """texts: the first two of one seed, the rest of other seeds."""
    if texts[0] != texts[1]:
        return ignored(f"seed 11 gave {quote(texts[0])} and then {quote(texts[1])}")
    if len(set(texts)) == 1:
        return skipped("all seeds gave the same text, as if nothing were drawn")
    return honoured("the same seed gave the same text, others gave others")


@check("field.top_p", "top_p near 0 leaves the likeliest token", Group.FIELDS, weight=1, requests=3, hint=OBEY)
async def top_p(session: Session) -> Finding:
    """Equal to the greedy text (INP-17)."""
    surface = session.main_surface()
    session.need_stable(surface)
    prompt = STORY[surface.value]
    greedy = expect_answer(await ask_field(session, surface, prompt, max_tokens=24), "the greedy comparison")
    replies = [await ask_field(session, surface, prompt, temperature=1.4, top_p=1e-6, max_tokens=24) for _ in range(2)]
    answers = answered(replies, "top_p")
    if isinstance(answers, Finding):
        return answers
    different = next((answer.text for answer in answers if answer.text != greedy.text), None)
    if different is None:
        return honoured("top_p 0.000001 at temperature 1.4 gave the greedy text")
    return ignored(f"top_p 0.000001 gave {quote(different)}, greedy is {quote(greedy.text)}")


@check("field.n", "n gives several choices", Group.FIELDS, weight=2, requests=1, hint=OBEY)
async def several(session: Session) -> Finding:
    """Two choices with indices 0 and 1, both in the usage (INP-07)."""
    answers = answered([await ask_field(session, session.main_surface(), temperature=1, n=2, max_tokens=4)], "n")
    return answers if isinstance(answers, Finding) else judge_indices(answers[0], [0, 1])


def judge_indices(answer: Answer, wanted: list[int]) -> Finding:
    """The choices' indices, in order."""
    indices = [choice.index for choice in answer.choices]
    if indices == wanted:
        return honoured(f"choices {indices}, usage {answer.usage.shown()}")
    if len(indices) < len(wanted):
        return ignored(f"{len(indices)} choice(s) where {len(wanted)} were asked for")
    return failed(f"choices have the indices {indices}, not {wanted}")


@check("field.logit_bias", "logit_bias +100 forces a token", Group.FIELDS, weight=1, requests=4, hint=OBEY)
async def logit_bias(session: Session) -> Finding:
    """The answer is one token again and again (INP-05). Ids are tried until one shows as text."""
    surface = session.main_surface()
    plain = expect_answer(await ask_field(session, surface, max_tokens=BIASED_TOKENS), "the comparison")
    seen = ""
    for token_id in BIASED_IDS:
        reply = await ask_field(session, surface, logit_bias={str(token_id): 100}, max_tokens=BIASED_TOKENS)
        answers = answered([reply], "logit_bias")
        if isinstance(answers, Finding):
            return answers
        seen = answers[0].text
        if is_repeated(seen, BIASED_TOKENS):
            return honoured(f"+100 on token {token_id} gave {quote(seen)}")
    if seen == plain.text:
        return ignored(f"+100 on token {BIASED_IDS[-1]} changed nothing: {quote(seen)}")
    return ignored(f"+100 on token {BIASED_IDS[-1]} did not force it: {quote(seen)}")


def is_repeated(text: str, times: int) -> bool:
    """Whether the text is one piece so many times. A leading space of the first may be missing."""
    piece = text[-(-len(text) // times) * -1 :] if text else ""
    whole = piece * times
    return bool(text) and whole.endswith(text) and len(whole) - len(text) <= 1


async def _penalty(session: Session, name: str) -> Finding:
    session.main_surface()
    surface = session.surfaces()[-1]  # completions repeat most reliably
    session.need_stable(surface)
    prompt = LOOP[surface.value]
    plain = expect_answer(await ask_field(session, surface, prompt, max_tokens=40), "the comparison")
    answers = answered([await ask_field(session, surface, prompt, max_tokens=40, **{name: 2.0})], name)
    if isinstance(answers, Finding):
        return answers
    words = plain.text.split()
    if not words or max(words.count(word) for word in set(words)) < 5:
        raise CannotJudge(f"the model repeats nothing that a penalty could change: {quote(plain.text)}")
    if answers[0].text == plain.text:
        return ignored(f"{name} 2 changed nothing in {quote(plain.text)}")
    return honoured(f"{name} 2 broke the repetition: {quote(answers[0].text)}")


@check("field.frequency_penalty", "frequency_penalty breaks repetition", Group.FIELDS, weight=1, requests=2, hint=OBEY)
async def frequency_penalty(session: Session) -> Finding:
    """A loop-prone prompt with and without (INP-13)."""
    return await _penalty(session, "frequency_penalty")


@check("field.presence_penalty", "presence_penalty changes repetition", Group.FIELDS, weight=1, requests=2, hint=OBEY)
async def presence_penalty(session: Session) -> Finding:
    """A loop-prone prompt with and without. One token's penalty of 2 may rightly change nothing, so that is not a fault."""
    finding = await _penalty(session, "presence_penalty")
    if finding.outcome is Outcome.FAIL and finding.verdict == "ignored":
        return skipped("a presence penalty of 2 changed nothing, which a very likely repetition also explains")
    return finding


@check(
    "field.unknown",
    "unknown fields are accepted",
    Group.FIELDS,
    weight=1,
    requests=1,
    hint="SDKs and gateways add fields of their own; refusing them breaks clients.",
)
async def unknown(session: Session) -> Finding:
    """A name that no API has (LIM-14)."""
    reply = await ask_field(session, session.main_surface(), max_tokens=2, audit_unknown_field=1)
    return passed("200") if reply.status == 200 else failed(reply.summary())


@check(
    "field.user",
    "user and metadata are accepted",
    Group.FIELDS,
    weight=1,
    requests=1,
    hint="Applications send user; take it, even if nothing is done with it.",
)
async def user(session: Session) -> Finding:
    """Harmless fields of the API."""
    reply = await ask_field(session, session.main_surface(), max_tokens=2, user="audit", metadata={"purpose": "audit"})
    return passed("200") if reply.status == 200 else failed(reply.summary())


@check(
    "field.content-parts",
    "message content as a list of text parts",
    Group.FIELDS,
    weight=2,
    requests=1,
    hint="SDKs send content as parts; join the text parts before the chat template is applied.",
)
async def content_parts(session: Session) -> Finding:
    """The same text as a list of one part gives the same answer."""
    plain = session.need(Surface.CHAT)
    body = session.body(Surface.CHAT)
    text = body["messages"][0]["content"]
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    answers = answered([await session.post(Surface.CHAT.path, body)], "content")
    if isinstance(answers, Finding):
        return answers
    tokens = answers[0].usage.prompt_tokens, plain.answer.usage.prompt_tokens
    if None not in tokens and tokens[0] != tokens[1]:
        return failed(f"{tokens[0]} prompt tokens as parts, {tokens[1]} as a string")
    if plain.is_stable and answers[0].text != plain.answer.text:
        return failed(f"as parts {quote(answers[0].text)}, as a string {quote(plain.answer.text)}")
    return honoured("the same answer as for a string")


@check("field.echo", "echo returns the prompt (completions)", Group.FIELDS, weight=1, requests=1, hint=OBEY)
async def echo(session: Session) -> Finding:
    """The text begins with the prompt."""
    session.need(Surface.TEXT)
    prompt = "The river was wide and"
    answers = answered([await ask_field(session, Surface.TEXT, prompt, echo=True, max_tokens=4)], "echo")
    if isinstance(answers, Finding):
        return answers
    text = answers[0].text
    if text.startswith(prompt):
        return honoured(quote(text))
    return ignored(f"the text does not begin with the prompt: {quote(text)}")


@check("field.suffix", "suffix changes the answer (completions)", Group.FIELDS, weight=1, requests=1, hint=OBEY)
async def suffix(session: Session) -> Finding:
    """Compared with the reference; what a good filling is cannot be judged."""
    reference = session.need_stable(Surface.TEXT)
    answers = answered([await ask_field(session, Surface.TEXT, suffix=" and so the count ended.")], "suffix")
    if isinstance(answers, Finding):
        return answers
    if answers[0].text == reference.text:
        return ignored("the answer is the same as without suffix")
    return honoured(f"the answer is another: {quote(answers[0].text)}")


@check("field.list-prompt", "a list of prompts (completions)", Group.FIELDS, weight=2, requests=1, hint=OBEY)
async def list_prompt(session: Session) -> Finding:
    """Two prompts give the choices 0 and 1, in order (INP-11)."""
    session.need(Surface.TEXT)
    body = session.body(Surface.TEXT, max_tokens=2) | {"prompt": ["The river", "Once upon a time"]}
    answers = answered([await session.post(Surface.TEXT.path, body)], "prompt")
    return answers if isinstance(answers, Finding) else judge_indices(answers[0], [0, 1])


@check("field.token-prompt", "a prompt of token ids (completions)", Group.FIELDS, weight=1, requests=1, hint=OBEY)
async def token_prompt(session: Session) -> Finding:
    """Five ids are five prompt tokens; one more for a beginning-of-sequence token is allowed."""
    session.need(Surface.TEXT)
    body = session.body(Surface.TEXT, max_tokens=2) | {"prompt": [500, 501, 502, 503, 504]}
    answers = answered([await session.post(Surface.TEXT.path, body)], "prompt")
    if isinstance(answers, Finding):
        return answers
    got = answers[0].usage.prompt_tokens
    if got in (5, 6):
        return honoured(f"5 ids are {got} prompt tokens")
    return failed(f"5 ids are {got} prompt tokens")
