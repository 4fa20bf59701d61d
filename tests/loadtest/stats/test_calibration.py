"""Which of a server's ways to tell token counts is taken. The wire itself is replaced."""

import pytest

from headrace.loadtest import calibration


@pytest.fixture
def server(monkeypatch):
    """`answers[path ending]` makes the reply from the body; requests are kept."""
    answers, seen = {}, []

    def post(url, body, headers):
        seen.append((url, body, dict(headers)))
        return next((answer(body) for ending, answer in answers.items() if url.endswith(ending)), {})

    monkeypatch.setattr(calibration, "_post", post)
    return answers, seen


def words(text):
    return len(text.split(" "))


def test_usage_goes_first_and_counts_the_chat_template(server):
    answers, seen = server
    answers["/v1/chat/completions"] = lambda body: {"usage": {"prompt_tokens": words(body["messages"][0]["content"]) + 30}}
    found = calibration.calibrate_against("http://127.0.0.1:1/v1", "m", "chat", {"Authorization": "Bearer k"})
    assert (found.tokens_per_word, found.overhead_tokens) == (1.0, 30.0)
    assert found.source.startswith("measured by usage")
    assert [url for url, _, _ in seen] == ["http://127.0.0.1:1/v1/chat/completions"] * 2
    assert all(body["max_tokens"] == 1 and body["model"] == "m" for _, body, _ in seen)
    assert all(headers == {"Authorization": "Bearer k"} for _, _, headers in seen)


@pytest.mark.parametrize(
    "reply", [lambda body: {"count": 2 * words(body["prompt"])}, lambda body: {"tokens": [0] * (2 * words(body["content"]))}]
)
def test_both_forms_of_tokenize_are_understood_where_there_is_no_usage(server, reply):
    answers, seen = server
    answers["/tokenize"] = reply
    answers["/v1/completions"] = lambda _: {"choices": []}
    found = calibration.calibrate_against("http://127.0.0.1:1/v1/", "m", "completions", {})
    assert (found.tokens_per_word, found.overhead_tokens) == (2.0, 0.0)
    assert found.source.startswith("measured by /tokenize")
    assert seen[-1][0] == "http://127.0.0.1:1/tokenize"


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": True}, {"prompt_tokens": "64"}, {"prompt_tokens": 0}])
def test_a_server_that_does_not_tell_leaves_the_assumption(server, usage):
    answers, _ = server
    answers["/v1/completions"] = lambda _: {"usage": usage}
    assert calibration.calibrate_against("http://127.0.0.1:1", "m", "completions", {}).source == "assumed: a token a word"
