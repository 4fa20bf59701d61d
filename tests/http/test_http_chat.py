"""POST /v1/chat/completions, whole answers."""

import pytest

from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.sampling import MAX_SEED
from tests.http.fakes import MAX_MODEL_LEN, MODEL, Surface, error_of, hangs_after, words

PROMPT_TOKENS = len("u:Hi;a:")


def test_answer_has_openais_shape(surface: Surface) -> None:
    """USE-05: the finish reason is the true one and the usage counts the template's tokens."""
    surface.service.script = words("Hel", "lo", finish="length")
    response = surface.chat(model=MODEL)
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["system_fingerprint"].startswith("fp_")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 2,
        "total_tokens": PROMPT_TOKENS + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_n_answers_share_the_prompt_in_usage_inp_07(surface: Surface) -> None:
    body = surface.chat(n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert body["usage"]["completion_tokens"] == 9
    assert len(surface.service.specs) == 3


def test_seeds_of_choices_are_distinct_and_repeatable(surface: Surface) -> None:
    surface.chat(n=4, seed=7)
    surface.chat(n=4, seed=7)
    first, second = surface.service.specs[:4], surface.service.specs[4:]
    seeds = [spec.sampling.seed for spec in first]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert seeds == [spec.sampling.seed for spec in second]
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_without_a_seed_each_choice_draws_its_own(surface: Surface) -> None:
    surface.chat(n=4)
    assert len({spec.sampling.seed for spec in surface.service.specs}) == 4


def test_every_parameter_reaches_the_specification(surface: Surface) -> None:
    """LIM-14: known fields are done."""
    response = surface.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": 100, "6": -100},
        stop=["x", "y"],
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=2,
        max_tokens=50,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-3,
        cache_salt="mine",
    )
    assert response.status_code == 200
    spec = surface.service.specs[0]
    sampling, stopping = spec.sampling, spec.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 0.9, 5, 0.1, 3)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, -1.0, 2.0)
    assert sampling.logit_bias == {5: 100.0, 6: -100.0}
    assert (stopping.max_tokens, stopping.min_tokens, stopping.stop_token_ids, stopping.ignore_eos) == (50, 2, (9,), True)
    assert (spec.stop_strings, spec.include_stop_string, spec.skip_special_tokens) == (("x", "y"), True, False)
    assert (spec.priority, spec.cache_salt) == (-3, "mine")


def test_max_completion_tokens_wins_lim_14(surface: Surface) -> None:
    surface.chat(max_tokens=5, max_completion_tokens=9)
    assert surface.service.specs[0].stopping.max_tokens == 9


def test_default_is_the_room_left_lim_07(surface: Surface) -> None:
    surface.chat()
    assert surface.service.specs[0].stopping.max_tokens == MAX_MODEL_LEN - PROMPT_TOKENS
    longest = "x" * (MAX_MODEL_LEN - len("u:;a:") - 1)
    assert surface.chat(messages=[{"role": "user", "content": longest}]).status_code == 200
    assert surface.service.specs[1].stopping.max_tokens == 1
    refused = surface.chat(messages=[{"role": "user", "content": longest + "x"}])
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "context_length_exceeded"
    assert error_of(refused)["param"] == "messages"


def test_context_length_message_states_the_numbers_lim_01(surface: Surface) -> None:
    room = MAX_MODEL_LEN - PROMPT_TOKENS
    assert surface.chat(max_tokens=room).status_code == 200, "the edge is accepted"
    error = error_of(surface.chat(max_tokens=room + 1))
    assert error["code"] == "context_length_exceeded"
    for number in (MAX_MODEL_LEN, PROMPT_TOKENS, room + 1):
        assert str(number) in error["message"]
    assert error_of(surface.chat(max_completion_tokens=10**9))["param"] == "max_completion_tokens"


def test_over_long_chats_are_never_cut_lim_02(surface: Surface) -> None:
    response = surface.chat(messages=[{"role": "user", "content": "key " + "word " * 100}])
    assert response.status_code == 400
    assert surface.service.specs == []


def test_roles_and_parts_become_plain_messages(surface: Surface) -> None:
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert surface.chat(messages=messages).status_code == 200
    assert surface.encoder.calls[0]["messages"] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_bad_messages_are_named_tpl_04(surface: Surface, message: dict[str, object], param: str) -> None:
    response = surface.chat(messages=[message])
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_prefill_is_the_same_as_string_and_as_parts_tpl_05(surface: Surface) -> None:
    question = {"role": "user", "content": "Q"}
    for content in ("The answer is", [{"type": "text", "text": "The answer is"}]):
        answer = {"role": "assistant", "content": content}
        assert surface.chat(messages=[question, answer], continue_final_message=True).status_code == 200
    first, second = surface.encoder.calls
    assert first == second
    assert first["continue_final_message"] is True
    assert first["add_generation_prompt"] is False


def test_prompt_modes_that_contradict_are_refused(surface: Surface) -> None:
    assert error_of(surface.chat(continue_final_message=True))["param"] == "continue_final_message"
    assert error_of(surface.chat(continue_final_message=True, add_generation_prompt=True))["param"] == "continue_final_message"
    assert surface.chat(add_generation_prompt=False).status_code == 200
    assert surface.encoder.calls[0]["add_generation_prompt"] is False


def test_template_variables_pass_but_may_not_replace_the_conversation(surface: Surface) -> None:
    assert surface.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert surface.encoder.calls[0]["variables"] == {"enable_thinking": False}
    assert error_of(surface.chat(chat_template_kwargs={"messages": []}))["param"] == "chat_template_kwargs"


def test_template_errors_are_the_clients(surface: Surface) -> None:
    """TPL-01 at this layer: what the encoder raises comes out as it is."""
    surface.encoder.error = RequestError("roles must alternate", code=ErrorCode.CHAT_TEMPLATE_ERROR)
    response = surface.chat()
    assert response.status_code == 400
    assert error_of(response)["code"] == "chat_template_error"


def test_a_failed_choice_fails_the_call_and_cancels_the_others(surface: Surface) -> None:
    hang = hangs_after("x")
    failing = RequestError("the worker was lost", code=ErrorCode.WORKER_LOST, retry_after_seconds=2)

    def script(spec, number):  # type: ignore[no-untyped-def]
        from headrace.gateway.deltas import TextDelta

        return [TextDelta(error=failing)] if number == 1 else hang(spec, number)

    surface.service.script = script
    response = surface.chat(n=3)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert error_of(response)["code"] == "worker_lost"
    assert all(stream.num_cancels == 1 for stream in surface.service.streams)


def test_a_refused_submit_cancels_those_before(surface: Surface) -> None:
    """RAT-07: a full server answers 503 with Retry-After, and nothing of the request keeps running."""
    surface.service.refuse_submit[2] = RequestError("full", code=ErrorCode.OVERLOADED, retry_after_seconds=3)
    response = surface.chat(n=4, stream=True)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert error_of(response)["type"] == "server_error"
    assert len(surface.service.specs) == 3
    assert [stream.num_cancels for stream in surface.service.streams] == [1, 1]
    assert surface.service.rejections == ["overloaded"]


def test_two_requests_with_one_client_id_are_two_requests_sch_14(surface: Surface) -> None:
    headers = {"x-request-id": "same"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    first, second = (surface.request("POST", "/v1/chat/completions", json=body, headers=headers) for _ in range(2))
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    assert first.json()["id"] != second.json()["id"]


@pytest.mark.parametrize("offered", ["a b", "x" * 200, "", 'a"b', "<script>"])
def test_a_strange_request_id_is_replaced(surface: Surface, offered: str) -> None:
    response = surface.request("GET", "/version", headers={"x-request-id": offered})
    assert response.headers["x-request-id"].startswith("req-")


def test_an_internal_fault_says_nothing_of_the_inside(surface: Surface) -> None:
    def script(spec, number):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("secret")

    surface.service.script = script
    response = surface.chat()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["code"] == "internal_error"
    assert surface.chat().status_code == 500, "the server lives"


def test_author_defaults_stand_behind_the_request(surface: Surface) -> None:
    import dataclasses

    from headrace.protocol.manifest import GenerationDefaults

    defaults = GenerationDefaults(temperature=0.3, top_p=0.8, top_k=40, min_p=0.05, repetition_penalty=1.2)
    surface.service.card = dataclasses.replace(surface.service.card, defaults=defaults)
    surface.chat(temperature=0.7)
    sampling = surface.service.specs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.8, 40, 0.05)
    assert sampling.repetition_penalty == 1.2
