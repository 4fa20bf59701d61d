"""The client of the live view against servers that behave, refuse, trickle and hang."""

import contextlib
import http.server
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from headrace.monitor import client as client_module
from headrace.monitor.client import Client
from headrace.monitor.scrape import Scrape
from tests.monitor.expositions import live, report
from tests.telemetry.odd_server import endless, odd_server

pytestmark = pytest.mark.slow

METRICS = "# TYPE headrace_worker_up gauge\nheadrace_worker_up 1\n"


@dataclass
class Pages:
    """What a server answers, by path; and what it was asked."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # path and Authorization
    connections: int = 0
    closes: bool = False  # every connection after its answer, without saying so
    before: Callable[[http.server.BaseHTTPRequestHandler], None] | None = None


@contextlib.contextmanager
def answering(pages: Pages) -> Iterator[str]:
    """A server in threads; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            pages.connections += 1

        def do_GET(self) -> None:
            pages.asked.append((self.path, self.headers.get("authorization", "")))
            status, body = pages.answers.get(self.path.split("?")[0], (404, b""))
            with contextlib.suppress(ConnectionError):
                if pages.before is not None:
                    pages.before(self)
                self.send_response(status)
                if status == 302:
                    self.send_header("location", "http://127.0.0.1:1/elsewhere")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            self.close_connection = self.close_connection or pages.closes

        def log_message(self, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def usual(**changes: tuple[int, bytes]) -> Pages:
    answers = {
        "/metrics": (200, METRICS.encode()),
        "/health/ready": (200, b'{"status":"ok"}'),
        "/debug/requests": (200, msgspec.json.encode(live(report("one")))),
        "/v1/models": (200, b'{"object":"list","data":[{"id":"a-model","object":"model"}]}'),
        "/version": (200, b'{"version":"1.2.3"}'),
    }
    return Pages({**answers, **{f"/{path.replace('_', '/')}": answer for path, answer in changes.items()}})


@contextlib.contextmanager
def looking(url: str, token: str = "", timeout_seconds: float = 5.0) -> Iterator[Client]:
    client = Client(url, token, timeout_seconds)
    try:
        yield client
    finally:
        client.close()


def test_one_look_over_one_connection() -> None:
    pages = usual()
    with answering(pages) as url, looking(url) as client:
        looks = [client.look(7) for _ in range(3)]
    for look in looks:
        assert (look.error, look.is_ready, look.model, look.version) == ("", True, "a-model", "1.2.3")
        assert look.metrics is not None
        assert look.metrics.total("headrace_worker_up") == 1
        assert look.requests == live(report("one"))
    assert pages.connections == 1
    assert [path for path, _ in pages.asked].count("/v1/models") == 1
    assert ("/debug/requests?limit=7", "") in pages.asked


def test_the_token_goes_to_the_guarded_page_only_and_no_redirect_is_followed() -> None:
    pages = usual(metrics=(302, b""))
    with answering(pages) as url, looking(url, "sesame") as client:
        look = client.look(7)
    assert {path for path, header in pages.asked if header} == {"/debug/requests?limit=7"}
    assert ("/debug/requests?limit=7", "Bearer sesame") in pages.asked
    assert look.metrics is None
    assert look.metrics_error == "/metrics: HTTP 302"


def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew() -> None:
    pages = usual()
    pages.closes = True
    with answering(pages) as url, looking(url) as client:
        assert [client.look(7).error for _ in range(3)] == [""] * 3


def test_refusals_are_given_in_the_servers_words() -> None:
    error = b'{"error":{"message":"Only with the admin token.","type":"x"}}'
    pages = usual(debug_requests=(403, error), metrics=(500, b"<html>"))
    pages.answers["/health/ready"] = (503, b'{"status":"no_worker","reason":"The model is being started."}')
    with answering(pages) as url, looking(url) as client:
        look = client.look(7)
    assert (look.is_ready, look.reason) == (False, "The model is being started.")
    assert look.requests_error == "HTTP 403: Only with the admin token."
    assert look.metrics_error == "/metrics: HTTP 500"


def test_answers_that_are_not_what_they_should_be() -> None:
    pages = Pages(dict.fromkeys(usual().answers, (200, b'\xff{"a":[')))
    with answering(pages) as url, looking(url) as client:
        look = client.look(7)
    assert look.error == ""
    assert "do not parse" in look.metrics_error
    assert "not understood" in look.requests_error
    assert (look.model, look.version) == ("", "")


def test_a_server_that_is_gone_and_comes_back() -> None:
    pages = usual()
    with answering(pages) as url, looking(url) as client:
        assert client.look(7).error == ""
    client = Client(url)
    look = client.look(7)
    client.close()
    assert look.error == "Connection refused"


def test_an_answer_that_is_too_large_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1 << 20)
    with answering(usual(metrics=(200, b"#" * (3 << 20)))) as url, looking(url) as client:
        assert "more than 1 MiB" in client.look(7).error

    def trickle(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(100):
            handler.wfile.write(b"#")
            time.sleep(0.05)

    pages = usual()
    pages.before = trickle
    with answering(pages) as url, looking(url, timeout_seconds=0.3) as client:
        began = time.monotonic()
        assert client.look(7).error == "no answer in time"
        assert time.monotonic() - began < 4  # and not the 100 pieces


@pytest.mark.parametrize(
    "answer",
    [
        lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
        lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n"),
        lambda: endless(b"H", 0.05),
        lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], endless(b"x-a: b\r\n", 0.05)),
        lambda: itertools.chain([b"HTTP/1.1 200 OK\r\nx-a: "], endless(b"b", 0.05)),
        lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n\r\n"], endless(b"#", 0.05)),
    ],
    ids=["continue", "continue-flood", "status-line", "headers", "header", "body"],
)
def test_an_answer_that_drips_for_ever(answer: Callable[[], Iterator[bytes]]) -> None:
    found: list[Scrape] = []
    with odd_server(answer) as odd, looking(odd.url, timeout_seconds=0.3) as client:
        thread = threading.Thread(target=lambda: found.append(client.look(7)), daemon=True)
        thread.start()
        thread.join(20)
    assert [look.error for look in found] == ["no answer in time"]


def test_each_page_has_the_whole_time_on_a_kept_connection() -> None:
    pages = usual()
    pages.before = lambda handler: time.sleep(0.25)
    with answering(pages) as url, looking(url, timeout_seconds=1.0) as client:
        looks = [client.look(7) for _ in range(2)]
    assert [look.error for look in looks] == ["", ""]
    assert pages.connections == 1


def test_a_server_that_hangs() -> None:
    pages = usual()
    has_ended = threading.Event()
    pages.before = lambda handler: has_ended.wait(20) and None
    with answering(pages) as url, looking(url, timeout_seconds=0.2) as client:
        assert client.look(7).error == "no answer in time"
        has_ended.set()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://server:1/v1/", "http://server:1"),
        ("https://server/models/v1", "https://server/models"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert Client(given).url == url


@pytest.mark.parametrize("given", ["ftp://server", "http://", "http://user:secret@server", "http://server:port", ""])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|Port"):
        Client(given)


def test_what_is_no_token() -> None:
    with pytest.raises(ValueError, match="token"):
        Client("http://server", "a\r\nx-evil: 1")


def test_a_name_that_no_host_can_have() -> None:
    with looking("http://a..b") as client:
        assert client.look(7).error
