"""What is found out before a load, and each way in which it cannot start."""

import http.server
import json
import threading

import pytest

from headrace.loadtest.studies.errors import StudyError
from headrace.loadtest.studies.server_facts import Reply, ask_server, base_url, look_up

URL = "http://127.0.0.1:8000"


def scripted(replies: dict[str, tuple[int, object]]):
    """An `ask` that answers by path; other paths are 404 with an error object."""
    asked: list[tuple[str, dict | None]] = []

    def ask(path: str, body: dict | None) -> Reply:
        asked.append((path, body))
        status, document = replies.get(path, (404, {"error": {"message": "no such path"}}))
        return Reply(status, "paper/1", document if isinstance(document, bytes) else json.dumps(document).encode())

    return ask, asked


MODELS = {"data": [{"id": "small", "max_model_len": 4096}]}
TWO = {"data": [{"id": "small"}, {"id": "large"}]}
OK = {"choices": []}


def test_the_only_model_is_taken_and_facts_are_kept():
    ask, asked = scripted({"/v1/models": (200, MODELS), "/v1/completions": (200, OK), "/version": (200, {"version": "1.2"})})
    facts = look_up(f"{URL}/v1/", model=None, key=None, api="completions", ask=ask)
    assert (facts.url, facts.model) == (URL, "small")
    assert facts.facts == {"server": "paper/1", "version": "1.2", "max_model_len": "4096"}
    proof = dict(asked)["/v1/completions"]
    assert proof == {"model": "small", "max_tokens": 1, "temperature": 0, "prompt": "Hello"}


def test_chat_is_proved_by_chat():
    ask, asked = scripted({"/v1/models": (200, MODELS), "/v1/chat/completions": (200, OK)})
    assert look_up(URL, model="small", key=None, api="chat", ask=ask).model == "small"
    assert "messages" in dict(asked)["/v1/chat/completions"]


def test_a_model_that_is_served_without_being_listed_is_fine():
    """llama.cpp's server takes any name, and some servers list none."""
    ask, _ = scripted({"/v1/models": (404, {}), "/v1/completions": (200, OK)})
    assert look_up(URL, model="anything", key=None, api="completions", ask=ask).model == "anything"


@pytest.mark.parametrize(
    ("replies", "model", "expected"),
    [
        ({"/v1/models": (401, {})}, None, "wants a key (401)"),
        ({"/v1/models": (200, TWO)}, None, "several models; choose one with --model: small, large"),
        ({"/v1/models": (404, {})}, None, "names no model (status 404). Name it with --model"),
        ({"/v1/models": (200, b"<html>")}, None, "names no model (status 200)"),
        ({"/v1/models": (200, {"data": [{"id": 7}, "x"]})}, None, "names no model"),
        (
            {"/v1/models": (200, MODELS), "/v1/completions": (404, {})},
            "huge",
            "does not know the model 'huge'. It serves: small",
        ),
        ({"/v1/models": (200, MODELS)}, None, "answers 404: no such path. Is the URL right, and --api?"),
        ({"/v1/models": (200, MODELS), "/v1/completions": (403, {})}, None, "wants a key (403)"),
        (
            {"/v1/models": (200, MODELS), "/v1/completions": (503, {"error": {"message": "too busy"}})},
            None,
            "answers 503 to a request for one token: too busy.",
        ),
        ({"/v1/models": (200, MODELS), "/v1/completions": (500, b"\x1b[31mboom\n")}, None, "one token: [31mboom."),
    ],
)
def test_what_cannot_work_is_one_clear_line(replies, model, expected):
    ask, _ = scripted(replies)
    with pytest.raises(StudyError) as caught:
        look_up(URL, model=model, key=None, api="completions", ask=ask)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_wrong_key_is_told_from_a_missing_one_and_never_shown():
    ask, _ = scripted({"/v1/models": (401, {})})
    with pytest.raises(StudyError) as caught:
        look_up(URL, model=None, key="sk-secret", api="chat", ask=ask)
    assert "does not accept the key (401)" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://h:80", "http://h:80"),
        ("http://h:80/", "http://h:80"),
        ("http://h/v1", "http://h"),
        (" https://h/openai/v1/ ", "https://h/openai"),
        ("localhost:8000", "http://localhost:8000"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_urls_with_and_without_v1(given, expected):
    assert base_url(given) == expected


@pytest.mark.parametrize(
    "given", ["", "ftp://h", "file:///etc/passwd", "http://", "http://h:port", "http://h/?key=1", "http://u:p@h"]
)
def test_what_is_no_base_url_is_refused(given):
    with pytest.raises(StudyError):
        base_url(given)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.end_headers()
            return
        body = json.dumps({"authorization": self.headers.get("Authorization"), "accept": self.headers.get("Accept")}).encode()
        self.send_response(418)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_over_http_any_status_is_an_answer_a_redirect_is_refused_and_no_server_is_said():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        reply = ask_server(base, "k", "/x", None)
        assert reply.status == 418
        assert reply.document() == {"authorization": "Bearer k", "accept": "application/json"}
        with pytest.raises(StudyError, match=r"redirects to http://127\.0\.0\.1:9/elsewhere"):
            ask_server(base, None, "/redirect", None)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(StudyError, match="is not reachable"):
        ask_server(base, None, "/x", None)
