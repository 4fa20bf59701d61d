"""The raw client against real sockets: framing, cuts, time-outs, kept connections, and the command as a whole."""

import asyncio
import json
import pathlib
from collections.abc import Awaitable, Callable

import pytest
from click.testing import CliRunner

from headrace.cli.audit import audit
from headrace.loadtest.audit.raw_client import RawClient
from headrace.loadtest.audit.wire import Ask, MonotonicClock, Reply, Target

pytestmark = pytest.mark.slow
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for header in head.lower().split(b"\r\n"):
        if header.startswith(b"content-length:"):
            head += await reader.readexactly(int(header.split(b":")[1]))
    return head


def answering(*parts: bytes, times: int = 1, pause_seconds: float = 0.0) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(times):
                await read_request(reader)
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause_seconds)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return handle


def ask_server(handler: Handler, *asks: Ask) -> list[Reply]:
    async def run() -> list[Reply]:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            client = RawClient(Target("http", "127.0.0.1", server.sockets[0].getsockname()[1]), MonotonicClock())
            replies = [await client.exchange(ask) for ask in asks]
            await client.aclose()
        return replies

    return asyncio.run(run())


GET = Ask("GET", "/x", timeout_seconds=5)


def test_content_length() -> None:
    (reply,) = ask_server(answering(b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 3\r\n\r\nabc"), GET)
    assert (reply.status, reply.body, reply.is_whole, reply.fault, reply.header("a")) == (200, b"abc", True, "", "b")


def test_chunks_keep_their_arrival() -> None:
    parts = (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nab\r\n", b"1;x=y\r\nc\r\n", b"0\r\nT: u\r\n\r\n")
    (reply,) = ask_server(answering(*parts, pause_seconds=0.02), GET)
    assert (reply.body, reply.is_whole, reply.fault) == (b"abc", True, "")
    assert len(reply.pieces) == 2
    assert reply.pieces[1][0] - reply.pieces[0][0] > 0.01


def test_until_close_and_interim_answers() -> None:
    (reply,) = ask_server(answering(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nabc"), GET)
    assert (reply.status, reply.body, reply.is_whole) == (200, b"abc", True)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "cut: the connection closed before a status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "cut: the connection closed inside the body"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "cut: the connection closed inside the body"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabcd", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "malformed"),
        (b"nonsense\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nnocolon\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 200_000 + b"\r\n\r\n", "cut"),
    ],
)
def test_broken_answers_become_faults(data: bytes, fault: str) -> None:
    (reply,) = ask_server(answering(data), GET)
    assert reply.fault.startswith(fault), reply.fault
    assert not reply.is_whole


def test_lanes_keep_connections_and_notice_closed_ones() -> None:
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    lane = Ask("GET", "/x", timeout_seconds=5, lane="a")
    replies = ask_server(answering(ok, times=2), lane, lane, lane)
    assert [reply.is_reused for reply in replies] == [False, True, True]
    assert [reply.fault[:3] for reply in replies] == ["", "", "cut"]
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    assert [reply.is_reused for reply in ask_server(answering(closing), lane, lane)] == [False, False]


def test_time_out_and_refused_connection() -> None:
    (reply,) = ask_server(answering(b"HTTP/1.1 200 OK\r\n", pause_seconds=3), Ask("GET", "/x", timeout_seconds=0.2))
    assert reply.fault.startswith("timeout")

    async def refused() -> Reply:
        return await RawClient(Target("http", "127.0.0.1", 1), MonotonicClock()).exchange(GET)

    assert asyncio.run(refused()).fault.startswith("connect")


def test_dropping_cuts_the_connection() -> None:
    gone = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await writer.drain()
        try:
            gone.append(await reader.read() == b"")
        except ConnectionError:
            gone.append(True)
        writer.close()

    drop = asyncio.Event()

    def on_piece(reply: Reply) -> None:
        if reply.num_body_bytes:
            drop.set()

    (reply,) = ask_server(handle, Ask("POST", "/x", timeout_seconds=5, drop=drop, on_piece=on_piece))
    assert (reply.is_dropped, reply.fault, reply.body) == (True, "", b"a")
    assert gone == [True]


def test_what_is_sent() -> None:
    seen = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n") + await reader.read(100))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    ask_server(handle, Ask("POST", "/x", (("A", "b"),), b"body", 5), Ask("POST", "/y", (), b"body", 5, is_chunked=True))
    assert seen[0].endswith(b"A: b\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody")
    assert seen[1].endswith(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n4\r\nbody\r\n0\r\n\r\n")


def test_redirects_are_not_followed() -> None:
    (reply,) = ask_server(answering(b"HTTP/1.1 307 R\r\nLocation: http://elsewhere.invalid/\r\nContent-Length: 0\r\n\r\n"), GET)
    assert reply.status == 307


def test_command_without_a_server(tmp_path: pathlib.Path) -> None:
    result = CliRunner().invoke(audit, ["http://127.0.0.1:1", "--json", str(tmp_path / "a.json")])
    assert result.exit_code == 1
    assert "No answer" in result.output
    assert not (tmp_path / "a.json").exists()
    assert CliRunner().invoke(audit, ["ftp://x"]).exit_code == 2


def test_command_writes_both_files(tmp_path: pathlib.Path) -> None:
    """Against a small server that answers everything alike; the limit of requests ends the audit early."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "one two"}, "text": "one two", "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    body = json.dumps({"data": [{"id": "m"}], "choices": [choice], "usage": usage}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def run() -> int:
        server = await asyncio.start_server(answering(head + body, times=99), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
            arguments = [f"http://127.0.0.1:{port}", "--max-requests", "20", "--fail-under", "99", *files]
            return (await asyncio.to_thread(CliRunner().invoke, audit, arguments)).exit_code

    assert asyncio.run(run()) == 2  # the score is below 99
    saved = json.loads((tmp_path / "a.json").read_text())
    assert (saved["model"], saved["num_requests"] <= 20) == ("m", True)
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
