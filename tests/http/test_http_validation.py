"""What is refused, and how it is said: bodies, types, values, fields."""

import json

import msgspec
import pytest

from headrace.gateway.http.bodies import MAX_IGNORED_NAMES, check_nesting
from headrace.gateway.http.schemas import ChatCompletionRequest, CompletionRequest
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.unsupported import rows_for
from headrace.protocol.errors import ConfigurationError, RequestError
from tests.http.fakes import VOCAB_SIZE, Surface, error_of

MESSAGES = b'"messages":[{"role":"user","content":"Hi"}]'


@pytest.mark.parametrize(
    "body",
    [b'{"model":"m", x}', b"", b"[]", b"null", b"5", b"{", b'{"messages":', b"\xff\xfe", b"{} trailing", b'"text"'],
)
def test_broken_bodies_are_400_lim_10(surface: Surface, body: bytes) -> None:
    response = surface.raw_chat(body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=utf-16"],
)
def test_wrong_media_type_is_415_lim_10(surface: Surface, content_type: str) -> None:
    response = surface.raw_chat(b"{" + MESSAGES + b"}", content_type)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=UTF-8", "application/vnd.x+json"])
def test_json_media_types_are_taken(surface: Surface, content_type: str) -> None:
    assert surface.raw_chat(b"{" + MESSAGES + b"}", content_type).status_code == 200


def test_compressed_bodies_are_415(surface: Surface) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert surface.request("POST", "/v1/chat/completions", content=b"x", headers=headers).status_code == 415


def test_long_bodies_are_413_whether_declared_or_not() -> None:
    surface = Surface(HttpSettings(max_body_bytes=1000))

    async def pieces():  # type: ignore[no-untyped-def]
        for _ in range(5):
            yield b" " * 300

    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, pieces()):
        response = surface.request("POST", "/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert error_of(response)["code"] == "content_too_large"


@pytest.mark.parametrize("depth", [100, 1000, 100_000])
@pytest.mark.parametrize("opener", [b"[", b'{"a":'])
@pytest.mark.parametrize("field", [b"x", b"tools", b"metadata", b"chat_template_kwargs"])
def test_deep_nesting_is_400_htt_01(surface: Surface, depth: int, opener: bytes, field: bytes) -> None:
    closer = b"]" if opener == b"[" else b"}"
    nested = b'{"deep":' + opener * depth + b"1" + closer * depth + b"}"
    response = surface.raw_chat(b"{" + MESSAGES + b',"' + field + b'":' + nested + b"}")
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


def test_nesting_counts_brackets_outside_of_strings_only() -> None:
    check_nesting(json.dumps({"a": "[" * 500 + '\\"' + "{" * 500, "b": [[]]}).encode(), 4)
    check_nesting(json.dumps([[n] for n in range(500)]).encode(), 2)
    with pytest.raises(RequestError):
        check_nesting(json.dumps([[[n]] for n in range(500)]).encode(), 2)
    with pytest.raises(RequestError):
        check_nesting(b"[" * 65 + b'"unterminated [', 64)
    check_nesting(b'"' + b'\\"[' * 100_000, 64)  # one string without an end, and in linear time
    with pytest.raises(RequestError):
        check_nesting(b"[]," * 300_000, 64)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b'"nan"', b"true", b"[]"])
def test_numbers_that_are_none_are_400_inp_14(surface: Surface, field: str, literal: bytes) -> None:
    response = surface.raw_chat(b"{" + MESSAGES + b',"' + field.encode() + b'":' + literal + b"}")
    assert response.status_code == 400
    error_of(response)
    assert surface.service.specs == []


@pytest.mark.parametrize("literal", ["1" * 30, "1" * 5000, "-1", "1.5", "NaN", '"7"', "true", "9223372036854775808"])
def test_seeds_that_are_none_are_400_inp_14(surface: Surface, literal: str) -> None:
    response = surface.raw_chat(b"{" + MESSAGES + b',"seed":' + literal.encode() + b"}")
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("value", [0, -1, -2, 1e12, "5", 1.5, True, 10**30])
def test_max_tokens_lim_05(surface: Surface, value: object) -> None:
    response = surface.chat(max_tokens=value)
    assert response.status_code == 400
    assert error_of(response)["param"] == "max_tokens"


def test_null_means_default_lim_05(surface: Surface) -> None:
    fields = [
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logit_bias",
        "tools",
        "user",
    ]
    assert surface.chat(**dict.fromkeys(fields)).status_code == 200
    assert surface.service.specs[0].sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", 10**6),
        ("min_tokens", 10**6),
        ("min_tokens", -1),
        ("stop_token_ids", [VOCAB_SIZE]),
        ("stop_token_ids", [-1]),
        ("priority", 2**40),
        ("cache_salt", ""),
        ("cache_salt", "x" * 300),
        ("logit_bias", {"9999999": 5}),
        ("logit_bias", {str(VOCAB_SIZE): 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {"1" * 5000: 1}),
    ],
)
def test_values_out_of_range_name_the_field(surface: Surface, field: str, value: object) -> None:
    """INP-05 (logit_bias), INP-08 (n), INP-13 (penalties)."""
    response = surface.chat(**{field: value})
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert surface.service.specs == []


def test_top_k_minus_one_means_all(surface: Surface) -> None:
    assert surface.chat(top_k=-1).status_code == 200
    assert surface.service.specs[0].sampling.top_k == 0


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ["x"] * 17, "x" * 2000, [None], 5])
def test_bad_stop_strings_stp_07(surface: Surface, stop: object) -> None:
    response = surface.chat(stop=stop)
    assert response.status_code == 400
    assert error_of(response)["param"] is not None
    assert error_of(response)["param"].startswith("stop")


@pytest.mark.parametrize(
    ("stop", "expected"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "。", "é"], ("a", "。", "é")), (["x"] * 16, ("x",) * 16)]
)
def test_good_stop_strings_stp_07(surface: Surface, stop: object, expected: tuple[str, ...]) -> None:
    assert surface.chat(stop=stop).status_code == 200
    assert surface.service.specs[0].stop_strings == expected


def test_many_faults_make_a_small_error_lim_11(surface: Surface) -> None:
    secret = "do not repeat me"
    response = surface.chat(messages=[{"role": 7, "content": secret * 10}] * 2000)
    assert response.status_code == 400
    assert secret not in response.text
    assert error_of(response)["param"] == "messages[0].role"
    response = surface.chat(model=secret * 1000)
    assert secret not in response.text
    error_of(response)


@pytest.mark.parametrize("stream", [False, True])
def test_lone_surrogates_are_400_utf_07(surface: Surface, stream: bool) -> None:
    body = b'{"stream":%s,"messages":[{"role":"user","content":"a\\ud83d b"}]}' % (b"true" if stream else b"false")
    response = surface.raw_chat(body)
    assert response.status_code == 400
    assert "Error" not in error_of(response)["message"]
    for escape in (b"\\udc00", b"\\ud83d\\u0041", b"\xed\xa0\x80"):
        assert surface.raw_chat(b'{"messages":[{"role":"user","content":"' + escape + b'"}]}').status_code == 400
    assert surface.raw_chat(b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}').status_code == 200


def test_unknown_fields_are_named_lim_14(surface: Surface) -> None:
    response = surface.chat(
        foo=1,
        **{"a b\r\nx: y": 2},
        stream=True,
        stream_options={"bar": 1},
        messages=[{"role": "user", "content": "x", "odd": 1}],
    )
    assert response.status_code == 200
    names = response.headers["x-headrace-ignored-fields"].split(", ")
    assert sorted(names) == ["a_b__x__y", "foo", "messages[].odd", "stream_options.bar"]
    assert "x-headrace-ignored-fields" not in surface.chat(user="me").headers


def test_names_of_unknown_fields_are_bounded(surface: Surface) -> None:
    response = surface.chat(**{f"{'x' * 1000}{number}": 1 for number in range(1000)}, **{f"é{n}": 1 for n in range(1000)})
    assert response.status_code == 200
    header = response.headers["x-headrace-ignored-fields"]
    assert len(header) < 1200
    assert len(header.split(", ")) <= MAX_IGNORED_NAMES + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("store", True),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("structured_outputs", {"choice": ["a"]}),
        ("guided_json", {}),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("echo", True),
        ("add_special_tokens", True),
        ("chat_template", "{{ messages }}"),
        ("truncate_prompt_tokens", 5),
        ("bad_words", ["x"]),
        ("allowed_token_ids", []),
        ("return_token_ids", True),
        ("documents", [{"text": "x"}]),
        ("stream_options", {"continuous_usage_stats": True}),
    ],
)
def test_known_but_not_implemented_is_refused_lim_14(surface: Surface, field: str, value: object) -> None:
    response = surface.chat(**{field: value}, **({"stream": True} if field == "stream_options" else {}))
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "unsupported_value"
    assert error["param"].startswith(field)


def test_values_that_change_nothing_are_accepted(surface: Surface) -> None:
    response = surface.chat(
        logprobs=False,
        top_logprobs=0,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        functions=[],
        modalities=["text"],
        store=False,
        metadata={"a": "b"},
        user="me",
        safety_identifier="me",
        service_tier="auto",
        reasoning_effort="none",
        verbosity="medium",
        prompt_cache_key="k",
        use_beam_search=False,
        length_penalty=1.0,
        echo=False,
        add_special_tokens=False,
        bad_words=[],
        stream=True,
        stream_options={"include_obfuscation": True},
    )
    assert response.status_code == 200, response.text
    assert "x-headrace-ignored-fields" not in response.headers


def test_stream_options_need_stream_use_02(surface: Surface) -> None:
    response = surface.chat(stream_options={"include_usage": True})
    assert response.status_code == 400
    assert error_of(response)["param"] == "stream_options"
    assert surface.chat(stream_options=None).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_unknown_model_is_not_an_unknown_path_lim_13(surface: Surface, path: str) -> None:
    body = {"model": "nope", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    unknown_model = surface.request("POST", path, json=body)
    assert unknown_model.status_code == 404
    assert error_of(unknown_model)["code"] == "model_not_found"
    assert error_of(unknown_model)["param"] == "model"
    unknown_path = surface.request("POST", "/v1/nope", json=body)
    assert unknown_path.status_code == 404
    assert error_of(unknown_path)["code"] == "not_found"


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong in ({"max_body_bytes": 0}, {"keep_alive_seconds": -1.0}, {"max_json_depth": 10_000}):
        with pytest.raises(ConfigurationError):
            HttpSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body_type", "implemented"),
    [(ChatCompletionRequest, frozenset()), (CompletionRequest, frozenset({"echo", "add_special_tokens", "best_of"}))],
)
def test_no_field_is_accepted_and_ignored_lim_14(body_type: type[msgspec.Struct], implemented: frozenset[str]) -> None:
    """Every field without a type of its own is in the table of refusals, or in this list of what has no effect anywhere."""
    no_effect = {
        *("user", "safety_identifier", "metadata", "spaces_between_special_tokens", "length_penalty"),
        *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
    }
    checked = {name for name, _ in rows_for(body_type, implemented)}
    untyped = {field.name for field in msgspec.structs.fields(body_type) if "Any" in str(field.type)}
    untyped -= {"chat_template_kwargs"}
    assert untyped - no_effect == checked - implemented
    assert untyped >= {"logprobs", "response_format"}, "the search for untyped fields finds them"
