"""The HTTP server under the application: real sockets, an application of a few lines."""

import asyncio
import socket
import threading
import time

import h2.config
import h2.connection
import h2.events
import pytest

from headrace.gateway.server import address_of, bind_socket
from headrace.protocol.errors import ConfigurationError
from tests.gateway.live_server import with_server

pytestmark = pytest.mark.slow


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-version", scope["http_version"].encode())]})
    if scope["path"] == "/stream":
        for _ in range(3):
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


def get(connection, path=b"/"):
    connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: test\r\n\r\n")
    answer = b""
    while b"end" not in answer:
        data = connection.recv(4096)
        assert data
        answer += data
    return answer


def test_an_idle_connection_is_kept_for_the_time_configured():
    """OPS-05"""

    def client(_server, address):
        with socket.create_connection(address, timeout=5) as connection:
            get(connection)
            time.sleep(0.5)
            get(connection)
            started = time.monotonic()
            assert connection.recv(1) == b""
            return time.monotonic() - started

    assert 0.5 < with_server(client, app, keep_alive_seconds=1.0) < 3


@pytest.mark.parametrize("answers", [True, False])
def test_ops_05_an_http_2_peer_that_answers_no_ping_is_dropped(answers, monkeypatch):
    """OPS-05: with the stream of a dead peer; one that answers is kept, idle as it is."""
    monkeypatch.setattr("headrace.gateway.server.PING_ANSWER_SECONDS", 1)
    endless = Endless(b"")

    def client(_server, address):
        http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        with socket.create_connection(address, timeout=1) as connection:
            ask(connection, 2, http)
            assert endless.started.wait(5)
            num_pings, deadline = 0, time.monotonic() + 5
            while time.monotonic() < deadline:
                try:
                    data = connection.recv(65536)
                except TimeoutError:
                    continue
                if not data:
                    break
                num_pings += sum(isinstance(event, h2.events.PingReceived) for event in http.receive_data(data))
                if answers:
                    connection.sendall(http.data_to_send())  # acknowledges what was received
            kept_open = time.monotonic() >= deadline
            assert num_pings >= (3 if answers else 1)
            return kept_open, endless.gone.wait(0 if kept_open else 2)

    assert with_server(client, endless, keep_alive_seconds=1.0) == ((True, False) if answers else (False, True))


def test_http_2_by_prior_knowledge():
    def client(_server, address):
        with socket.create_connection(address, timeout=5) as connection:
            http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
            http.initiate_connection()
            headers = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "test")]
            http.send_headers(1, headers, end_stream=True)
            connection.sendall(http.data_to_send())
            seen = {}
            while "end" not in seen:
                for event in http.receive_data(connection.recv(65536)):
                    if isinstance(event, h2.events.ResponseReceived):
                        seen.update(dict(event.headers))
                    elif isinstance(event, h2.events.StreamEnded):
                        seen["end"] = True
                connection.sendall(http.data_to_send())
            return seen

    assert with_server(client, app)["x-version"] in ("2", "2.0")


class Endless:
    """An application that streams without end, or waits, until it is told that the client has gone."""

    def __init__(self, frame):
        self.frame = frame
        self.num_bytes = 0  # taken from this application by the server
        self.started, self.gone = threading.Event(), threading.Event()

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        work = asyncio.ensure_future(self.stream(send) if self.frame else self.wait())
        assert (await receive())["type"] == "http.disconnect"
        self.gone.set()
        work.cancel()
        await asyncio.wait([work])

    async def stream(self, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await send({"type": "http.response.body", "body": self.frame, "more_body": True})
            self.num_bytes += len(self.frame)
            self.started.set()
            await asyncio.sleep(0)

    async def wait(self):
        self.started.set()
        await asyncio.Event().wait()


def ask(connection, http_version, http=None):
    """Send one GET; read nothing. `http`: the HTTP/2 connection to use."""
    if http_version == 1:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        return
    http = http or h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    http.initiate_connection()
    http.send_headers(1, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "test")], end_stream=True)
    connection.sendall(http.data_to_send())


@pytest.mark.parametrize("http_version", [1, 2])
def test_a_reader_that_stalls_stops_the_sender(http_version):
    """SLO-01: what the server takes from the application ahead of a client is bounded, and small."""
    endless = Endless(b"x" * 10_000)

    def client(_server, address):
        with socket.create_connection(address, timeout=5) as connection:
            ask(connection, http_version)
            assert endless.started.wait(5)
            deadline = time.monotonic() + 10
            before = -1
            while before != endless.num_bytes:
                assert endless.num_bytes < 32 << 20, "nothing holds the sender back"
                assert time.monotonic() < deadline
                before = endless.num_bytes
                time.sleep(0.5)
            if http_version == 1:  # in HTTP/2 reading alone is not enough: the window must be opened anew
                left = before
                while left > 0:
                    left -= len(connection.recv(1 << 20))
                give_up = time.monotonic() + 5
                while endless.num_bytes == before:
                    assert time.monotonic() < give_up, "reading on lets the sender go on"
                    time.sleep(0.01)
        assert endless.gone.wait(5), "a sender that is held back learns that its client went"

    with_server(client, endless)


@pytest.mark.parametrize("http_version", [1, 2])
@pytest.mark.parametrize("frame", [b"", b"data: x\n\n"], ids=["waiting", "streaming"])
def test_a_client_that_goes_is_told_at_once(http_version, frame):
    """DIS-01, as the server sees it."""
    endless = Endless(frame)

    def client(_server, address):
        with socket.create_connection(address, timeout=5) as connection:
            ask(connection, http_version)
            assert endless.started.wait(5)
        assert endless.gone.wait(2)

    with_server(client, endless)


def test_stopping_lets_answers_end_and_drops_idle_connections():
    def client(server, address):
        with socket.create_connection(address, timeout=5) as busy, socket.create_connection(address, timeout=5) as idle:
            get(idle)
            busy.sendall(b"GET /stream HTTP/1.1\r\nHost: test\r\n\r\n")
            busy.recv(4096)
            server.stop()
            answer = b""
            while data := busy.recv(4096):
                answer += data
            started = time.monotonic()
            assert idle.recv(1) == b""
            assert time.monotonic() - started < 3
            return answer

    assert with_server(client, app).endswith(b"0\r\n\r\n")


def test_a_port_in_use_is_named():
    with bind_socket("127.0.0.1", 0, 8) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"Port {port} .*--port"):
            bind_socket("127.0.0.1", port, 8)


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(ConfigurationError, match="--host"):
        bind_socket("no-such-host.invalid", 0, 8)
    with pytest.raises(ConfigurationError, match="--host"):
        bind_socket("203.0.113.7", 0, 8)


def test_the_address_is_one_that_can_be_opened():
    with bind_socket("0.0.0.0", 0, 8) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
