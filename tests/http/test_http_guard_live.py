"""The guard before /debug as the HTTP server shows requests to it: bytes on a socket, HTTP/1.0, 1.1 and 2."""

import socket

import h2.config
import h2.connection
import h2.events
import pytest

from tests.gateway.live_server import with_server

pytestmark = pytest.mark.slow

PATH = "/debug/requests"


def asking(surface, client):
    """What `client(address)` finds in a thread beside a server."""
    return with_server(lambda _server, address: client(address), surface.app)


def status_of(address, version, *headers):
    """Of a GET over HTTP/1, each header a line."""
    with socket.create_connection(address, timeout=5) as connection:
        lines = [b"GET " + PATH.encode() + b" HTTP/" + version, *headers, b"connection: close", b"", b""]
        connection.sendall(b"\r\n".join(lines))
        return int(connection.recv(4096).split(b" ")[1])


def status_over_http_2(address, *headers):
    with socket.create_connection(address, timeout=5) as connection:
        state = h2.connection.H2Connection(h2.config.H2Configuration(validate_outbound_headers=False))
        state.initiate_connection()
        state.send_headers(1, [(":method", "GET"), (":path", PATH), (":scheme", "http"), *headers], end_stream=True)
        connection.sendall(state.data_to_send())
        while data := connection.recv(65536):
            for event in state.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    return int({bytes(name): value for name, value in event.headers}[b":status"])
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        (b"1.1", [b"host: 127.0.0.1:8000"], 200),
        (b"1.0", [b"host: 127.0.0.1:8000", b"connection: close"], 403),  # nginx' proxy_pass without any other directive
        (b"1.0", [], 403),
        (b"1.1", [], 403),
        (b"1.1", [b"host: \xa0localhost"], 403),
        (b"1.1", [b"host: \xc2\xa0localhost"], 403),
        (b"1.1", [b"host: evil.example/x.localhost"], 403),
        (b"1.1", [b"host: evil.example", b"host: 127.0.0.1"], 400),
        (b"1.1", [b"host: 127.0.0.1", b"Host: 127.0.0.1"], 400),
        (b"1.1", [b"host: 127.0.0.1", b"Origin: http://127.0.0.1:3000"], 403),
        (b"1.1", [b"host: 127.0.0.1", b"X-Client-IP: 127.0.0.1"], 403),
    ],
)
def test_over_http_1(surface, version, headers, status):
    assert asking(surface, lambda address: status_of(address, version, *headers)) == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(":authority", "127.0.0.1:8000")], 200),
        ([(":authority", "evil.example")], 403),
        ([(":authority", "127.0.0.1"), ("host", "evil.example")], 403),
        ([(":authority", "127.0.0.1"), ("host", "127.0.0.1"), ("host", "evil.example")], 400),
        ([(":authority", "127.0.0.1"), ("via", "2 proxy")], 403),
    ],
)
def test_over_http_2(surface, headers, status):
    assert asking(surface, lambda address: status_over_http_2(address, *headers)) == status
