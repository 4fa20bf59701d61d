"""Cases about limits, refusals and the shape of streams, over HTTP on a simulated model with a small context."""

import json
from collections.abc import Iterator

import openai
import pytest

from harness import Server, serving
from tests.system.exchanges import ask, both_ways, error_of, refusal, send, streamed, text_of

pytestmark = pytest.mark.slow

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
CONTEXT = 128


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = f"sim:step_ms=1,token_us=5,max_model_len={CONTEXT}"
    with serving("--model", model, "--served-model-name", "sim", "--max-num-seqs", "8", quiet=False) as running:
        yield running


def chat(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def num_prompt_tokens(server: Server) -> int:
    return ask(server, "/tokenize", **chat("Hi"))["count"]


def ids(count: int) -> list[int]:
    return [5 + number % 7 for number in range(count)]


def test_sse_01_a_fault_known_before_the_first_byte_is_a_status(server: Server):
    status, error = refusal(server, CHAT, **chat("lorem " * 2 * CONTEXT))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="sim", messages=chat("lorem " * 2 * CONTEXT)["messages"], stream=True)
        assert caught.value.code == "context_length_exceeded"


def test_sse_07_line_ends_of_any_kind_do_not_tear_a_frame(server: Server):
    """SSE-07: a reader that splits at every Unicode line end sees the same lines, and gets the text back."""
    text = "a\u2028b\u2029c\u0085d\r\ne\x0b\x0c\x1c\x1d\x1ef"
    fields = {"prompt": text, "echo": True, "max_tokens": 3, "stream": True}
    status, body = send(server, COMPLETE, json.dumps(fields).encode())
    assert status == 200
    lines = [line for line in body.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines).startswith(text)


def test_sse_08_10_11_roles_and_endings_of_several_choices(server: Server):
    """SSE-08, SSE-10, SSE-11: one role, in the first delta and never null; one finish reason for each choice."""
    events = streamed(server, CHAT, **chat("Hi"), n=3, max_tokens=20)
    for index in range(3):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert len(choices) > 1
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert all(choice["delta"].get("content", "") is not None for choice in choices)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_stp_any_stop_string_cuts_at_its_first_character(server: Server):
    """STP-01, STP-04, STP-05, STP-08: strings over any number of tokens, from any place in them; streamed and whole."""
    body = {"prompt": "Tell me about rivers.", "temperature": 0, "max_tokens": 24}
    free = both_ways(server, COMPLETE, **body)
    text = free["text"]
    stops = {text[start : start + length] for start in range(0, 60, 7) for length in (1, 4, 13)}
    for stop in sorted(stops):
        cut = text.index(stop)
        outcome = both_ways(server, COMPLETE, **body, stop=[stop])
        assert (outcome["text"], outcome["finish"], outcome["stop"]) == (text[:cut], "stop", stop)
        kept = both_ways(server, COMPLETE, **body, stop=[stop, "never@"], include_stop_str_in_output=True)
        assert (kept["text"], kept["finish"]) == (text[: cut + len(stop)], "stop")
        assert kept["usage"]["completion_tokens"] == outcome["usage"]["completion_tokens"] <= 24
        assert len(ask(server, "/tokenize", prompt=kept["text"])["tokens"]) <= outcome["usage"]["completion_tokens"] + 1
    never = both_ways(server, COMPLETE, **body, stop=["never@", text[:3] + "@"])
    assert (never["text"], never["finish"], never["usage"]) == (text, "length", free["usage"])


def test_stp_07_stops_that_are_none(server: Server):
    for stop in (None, []):
        outcome = both_ways(server, COMPLETE, prompt="x", max_tokens=4, temperature=0, stop=stop)
        assert (outcome["finish"], outcome["usage"]["completion_tokens"]) == ("length", 4)
    for stop in ("", [""], ["a", ""]):
        status, error = refusal(server, COMPLETE, prompt="x", stop=stop)
        assert (status, error["param"]) == (400, "stop")


def test_lim_01_the_message_states_the_true_limit(server: Server):
    used = num_prompt_tokens(server)
    room = CONTEXT - used
    edge = ask(server, CHAT, **chat("Hi"), max_tokens=room, ignore_eos=True)
    assert edge["usage"]["total_tokens"] == CONTEXT
    status, error = refusal(server, CHAT, **chat("Hi"), max_tokens=room + 1)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    for number in (CONTEXT, used, room + 1):
        assert f" {number} " in error["message"]


def test_lim_02_over_long_chats_are_refused_not_cut(server: Server):
    messages = [
        {"role": "user", "content": "zebra"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "word " * CONTEXT},
    ]
    true_size = ask(server, "/tokenize", messages=messages)["count"]
    status, error = refusal(server, CHAT, messages=messages)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert f" {true_size} " in error["message"]


def test_lim_04_07_without_max_tokens_the_context_is_the_limit(server: Server):
    """LIM-04, LIM-07: several prompts at once, no end token: each ends with "length" when its context is full."""
    used = num_prompt_tokens(server)
    answer = ask(server, CHAT, **chat("Hi"), n=4, ignore_eos=True)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
    assert answer["usage"]["completion_tokens"] == 4 * (CONTEXT - used)
    last = ask(server, COMPLETE, prompt=ids(CONTEXT - 1))
    assert (last["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 1)
    status, error = refusal(server, COMPLETE, prompt=ids(CONTEXT))
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize("value", [0, -1, -2, 10**12, "5", 1.5, True, [5]])
def test_lim_05_values_that_mean_nothing(server: Server, value: object):
    for path, body in ((CHAT, chat("Hi")), (COMPLETE, {"prompt": "Hi"})):
        status, error = refusal(server, path, **body, max_tokens=value)
        assert (status, error["param"]) == (400, "max_tokens")


def test_lim_05_null_is_the_default_and_echo_alone_needs_nothing(server: Server):
    assert ask(server, COMPLETE, prompt="Hi", max_tokens=None, ignore_eos=True)["usage"]["completion_tokens"] == 16
    echo = ask(server, COMPLETE, prompt="Hi", max_tokens=0, echo=True)
    assert (echo["choices"][0]["text"], echo["usage"]["completion_tokens"]) == ("Hi", 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
def test_lim_10_11_13_refusals_are_alike_on_every_endpoint(server: Server, path: str):
    """LIM-10, LIM-11, LIM-13."""
    for payload in (b'{"model":"m", x}', b"", b"[]", b"null", b"\xff"):
        status, body = send(server, path, payload)
        assert (status, error_of(body)["type"]) == (400, "invalid_request_error")
    status, body = send(server, path, b"{}", "text/plain")
    assert (status, error_of(body)["code"]) == (415, "unsupported_media_type")
    wrong = {"messages": [{"secret": 5}] * 2000, "prompt": {"secret": 5}, "tokens": ["secret"] * 2000}
    status, body = send(server, path, json.dumps(wrong).encode())
    assert status == 400
    assert "secret" not in error_of(body)["message"]
    unknown = {"model": "nope", "prompt": "x", **chat("x"), "tokens": [1]}
    status, body = send(server, path, json.dumps(unknown).encode())
    assert (status, error_of(body)["code"]) == (404, "model_not_found")


def test_lim_13_models_and_paths_are_told_apart(server: Server):
    for path, code in (
        ("/v1/models/nope", "model_not_found"),
        ("/v1/nope", "not_found"),
        ("/v2/models/nope/infer", "not_found"),
    ):
        status, body = server.get(path)
        assert (status, error_of(body.encode())["code"]) == (404, code)
    assert json.loads(server.get("/v1/models/sim")[1])["id"] == "sim"


def test_lim_14_known_fields_are_done(server: Server):
    body = chat("Hi") | {"ignore_eos": True}
    both = ask(server, CHAT, **body, max_tokens=9, max_completion_tokens=4)
    assert both["usage"]["completion_tokens"] == 4
    seeded = [ask(server, CHAT, **body, max_tokens=9, seed=seed, n=2, temperature=1)["choices"] for seed in (7, 7, 8)]
    assert seeded[0] == seeded[1]
    assert len({text_of(choice) for choices in seeded[1:] for choice in choices}) == 4
    status, error = refusal(server, CHAT, **body, logprobs=True)
    assert (status, error["param"]) == (400, "logprobs")


def test_inp_01_02_08_11_14_bad_prompts_and_values_touch_nobody(server: Server):
    """INP-01, INP-02, INP-08, INP-11, INP-14: each is refused by name, and the next call works."""
    size = 49152
    prompts = {"prompt": ["", [""], [], [[]], [size], [2**31], [2**40], [-1], "x" * 9 * CONTEXT]}
    cases = [(COMPLETE, {name: value}, "prompt") for name, values in prompts.items() for value in values]
    cases += [
        (COMPLETE, {"prompt": ["A", "lorem " * CONTEXT, "C"]}, "prompt[1]"),
        (COMPLETE, {"prompt": ["A", ""]}, "prompt[1]"),
    ]
    cases += [(CHAT, {"messages": []}, "messages"), (CHAT, chat("x") | {"n": 512}, "n"), (CHAT, chat("x") | {"n": 10**6}, "n")]
    for path, fields, param in cases:
        status, error = refusal(server, path, **fields)
        assert (status, error["param"]) == (400, param), fields
    for literal in ("NaN", "Infinity", "-Infinity", "1e400", '"nan"'):
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"):
            status, body = send(server, COMPLETE, f'{{"prompt":"x","{name}":{literal}}}'.encode())
            assert status == 400, (name, literal)
            error_of(body)
    answer = ask(server, COMPLETE, prompt=["A", "B", "C"], n=2, max_tokens=3, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 18)
    crowd = ask(server, COMPLETE, prompt="x", n=40, max_tokens=2, ignore_eos=True)
    assert crowd["usage"]["completion_tokens"] == 80, "more choices than the batch has places"
