"""POST /v1/completions: forms of a prompt, echo, order of choices; /tokenize and /detokenize."""

import json

import pytest

from headrace.gateway.deltas import GenerationSpec, TextDelta
from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.messages import Usage
from tests.http.fakes import BOS, MAX_MODEL_LEN, VOCAB_SIZE, Surface, error_of, events_of


def named(spec: GenerationSpec, number: int) -> list[TextDelta | None]:
    """Each choice says which prompt it continues."""
    text = bytes(spec.prompt_token_ids).decode()
    usage = Usage(len(spec.prompt_token_ids), 2, num_cached_tokens=1)
    return [TextDelta(f"<{text}", 1), TextDelta(f"-{number}>", 1, finish_reason="stop", usage=usage)]


def test_answer_has_openais_shape(surface: Surface) -> None:
    body = surface.complete().json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello!", "finish_reason": "stop", "logprobs": None, "stop_reason": None}]
    assert surface.service.specs[0].stopping.max_tokens == 16


def test_default_of_16_gives_way_to_the_room_left(surface: Surface) -> None:
    surface.complete(prompt="x" * (MAX_MODEL_LEN - 4))
    assert surface.service.specs[0].stopping.max_tokens == 4
    response = surface.complete(prompt="x" * (MAX_MODEL_LEN - 4), max_tokens=16)
    assert response.status_code == 400, "what was asked for is never changed"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("AB", [[65, 66]]),
        (["A", "B"], [[65], [66]]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
def test_four_forms_of_a_prompt(surface: Surface, prompt: object, expected: list[list[int]]) -> None:
    assert surface.complete(prompt=prompt).status_code == 200
    assert [spec.prompt_token_ids for spec in surface.service.specs] == expected


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[65], []]])
def test_empty_prompts_are_400_inp_01(surface: Surface, prompt: object) -> None:
    response = surface.complete(prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("prompt")
    assert surface.service.specs == []
    assert surface.complete().status_code == 200, "the next call works"


def test_an_empty_text_is_bos_where_the_model_has_one_inp_01() -> None:
    surface = Surface(add_bos=True)
    assert surface.complete(prompt="").status_code == 200
    assert surface.service.specs[0].prompt_token_ids == [BOS]
    assert surface.complete(prompt="", add_special_tokens=False).status_code == 400


def test_empty_chats_are_400_inp_01(surface: Surface) -> None:
    assert error_of(surface.chat(messages=[]))["param"] == "messages"
    assert surface.chat(messages=[{"role": "user", "content": ""}]).status_code == 200


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [2**31], [2**40], [2**80], [-1], [[1], [VOCAB_SIZE]]])
def test_ids_outside_of_the_vocabulary_inp_02(surface: Surface, prompt: object) -> None:
    response = surface.complete(prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("prompt")
    assert surface.complete(prompt=[VOCAB_SIZE - 1]).status_code == 200


@pytest.mark.parametrize("prompt", [["a", 1], [[1], "a"], [1, [1]], [1.5], [True], {"a": 1}, None, [None], [["a"]]])
def test_mixtures_are_refused(surface: Surface, prompt: object) -> None:
    response = surface.complete(prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("prompt")


def test_order_of_choices_inp_11(surface: Surface) -> None:
    surface.service.script = named
    body = surface.complete(prompt=["A", "B", "C"], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["<A-0>", "<A-1>", "<B-2>", "<B-3>", "<C-4>", "<C-5>"]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 12, 15)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


def test_order_of_choices_in_a_stream_inp_11(surface: Surface) -> None:
    surface.service.script = named
    response = surface.complete(prompt=["A", "B", "C"], n=2, stream=True, stream_options={"include_usage": True})
    events = events_of(response.content)
    usage = events.pop()["usage"]
    texts = [""] * 6
    for event in events:
        assert event["usage"] is None
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["<A-0>", "<A-1>", "<B-2>", "<B-3>", "<C-4>", "<C-5>"]
    assert usage["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_one_over_long_item_fails_the_whole_call_inp_11(surface: Surface, stream: bool) -> None:
    response = surface.complete(prompt=["A", "x" * MAX_MODEL_LEN, "C"], stream=stream)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "Prompt 1" in error["message"]
    assert error["param"] == "prompt[1]"
    assert surface.service.specs == []


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_ids_inp_10(surface: Surface, stream: bool) -> None:
    response = surface.complete(prompt=[72, 105], echo=True, stream=stream)
    if stream:
        text = "".join(event["choices"][0]["text"] for event in events_of(response.content))
    else:
        text = response.json()["choices"][0]["text"]
    assert text == "HiHello!"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_needs_no_output_lim_05(surface: Surface, stream: bool) -> None:
    """max_tokens 0 is allowed on completions with echo, and with nothing else."""
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    response = surface.complete(echo=True, max_tokens=0, n=2, stream=stream, **fields)
    assert response.status_code == 200
    if stream:
        events = events_of(response.content)
        usage = events.pop()["usage"]
        assert [event["choices"][0]["text"] for event in events] == ["Hi", "Hi"]
    else:
        usage = response.json()["usage"]
        assert [choice["text"] for choice in response.json()["choices"]] == ["Hi", "Hi"]
        assert response.json()["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0
    assert surface.service.specs == []
    assert surface.complete(max_tokens=0).status_code == 400
    assert surface.complete(echo=True, prompt="x" * MAX_MODEL_LEN, max_tokens=0).status_code == 200
    assert surface.complete(echo=True, prompt="x" * (MAX_MODEL_LEN + 1), max_tokens=0).status_code == 400


@pytest.mark.parametrize("fields", [{"best_of": 3}, {"n": 3, "best_of": 2}, {"suffix": "x"}, {"logprobs": 0}, {"logprobs": 5}])
def test_not_implemented_fields(surface: Surface, fields: dict[str, object]) -> None:
    """INP-08: best_of < n is refused at once."""
    response = surface.complete(**fields)
    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_value"
    assert surface.complete(n=2, best_of=2, suffix="", logprobs=None).status_code == 200


def test_prompts_times_n_is_bounded_inp_08() -> None:
    surface = Surface(HttpSettings(max_sequences=6))
    assert surface.complete(prompt=["a"] * 3, n=2).status_code == 200
    assert surface.complete(prompt=["a"] * 4, n=2).status_code == 400


def test_long_texts_are_tokenized_on_a_thread_and_bounded() -> None:
    surface = Surface(HttpSettings(long_text_chars=10))
    assert surface.complete(prompt="x" * 50).status_code == 200
    assert surface.chat(messages=[{"role": "user", "content": "x" * 50}]).status_code == 200
    surface.app.close()


def test_tokenize_and_back(surface: Surface) -> None:
    body = surface.request("POST", "/tokenize", json={"prompt": "Hé", "return_token_strs": True}).json()
    assert body["tokens"] == list("Hé".encode())
    assert (body["count"], body["max_model_len"], len(body["token_strs"])) == (3, MAX_MODEL_LEN, 3)
    assert surface.request("POST", "/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "Hé"}
    assert surface.request("POST", "/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_tokenize_takes_a_conversation(surface: Surface) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = surface.request("POST", "/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert body["tokens"] == list(b"u:Hi;")
    assert body["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "add_special_tokens": True}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_bad_tokenize_bodies(surface: Surface, path: str, body: dict[str, object]) -> None:
    response = surface.request("POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)
