"""A scripted server that stamps its own sends: the truth that the load tool is measured against.

Owns: an HTTP/1.1 server of raw asyncio streams, and its log. Runs in: a process of its own, which prints its port.
Must not know: the load tool.

A request's body holds `truth`: {"id", "steps": [[delay_ms, action, ...], ...]} and optionally "head_ms" (before the headers),
"status", "retry_after", "refuses_usage", "newline", "content_type". GET /log gives what was really sent, and when, on the
monotonic clock.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Sent:
    """What was sent for one request. Times on the monotonic clock; an event's time is that of its last byte."""

    id: str
    connection: int
    received_at: float
    asked_usage: bool
    body: dict[str, Any]
    headers: dict[str, str]
    headers_at: float | None = None
    first_event_at: float | None = None
    texts: list[tuple[float, int]] = field(default_factory=list)  # (time, characters)
    ended_at: float | None = None


LOG: list[Sent] = []


class Script:
    """Plays the steps of one request."""

    def __init__(
        self, truth: dict[str, Any], sent: Sent, writer: asyncio.StreamWriter, *, is_stream: bool, is_chat: bool
    ) -> None:
        self.truth = truth
        self.sent = sent
        self.writer = writer
        self.is_stream = is_stream
        self.is_chat = is_chat
        self.newline = truth.get("newline", "\n")
        self.due = time.monotonic()
        self.whole_text = ""
        self.finish: str | None = None
        self.usage: dict[str, int] | None = None

    async def pause(self, milliseconds: float) -> None:
        self.due += milliseconds / 1e3
        await asyncio.sleep(max(0.0, self.due - time.monotonic()))

    async def play(self) -> bool:
        """Whether the connection may be kept."""
        await self.pause(self.truth.get("head_ms", 0))
        status = self.truth.get("status", 200)
        if self.truth.get("refuses_usage") and self.sent.asked_usage:
            return await self.answer(
                400, {"error": {"message": "stream_options is not supported", "type": "invalid_request_error"}}
            )
        if status != 200:
            return await self.answer(status, {"error": {"message": "not now", "type": "overloaded"}})
        if not self.is_stream:
            return await self.play_whole()
        self.write_head(200, self.truth.get("content_type", "text/event-stream"), "Transfer-Encoding: chunked")
        for delay_ms, action, *arguments in self.truth["steps"]:
            await self.pause(delay_ms)
            if action == "cut":
                self.writer.transport.abort()
                return False
            await getattr(self, f"do_{action}")(*arguments)
            await self.writer.drain()  # raises when the client is gone
        self.sent.ended_at = time.monotonic()
        self.writer.write(b"0\r\n\r\n")
        return True

    async def play_whole(self) -> bool:
        for delay_ms, action, *arguments in self.truth["steps"]:
            await self.pause(delay_ms)
            if action in ("text", "dribble"):
                self.whole_text += arguments[0]
            elif action == "merged":
                self.whole_text += "".join(arguments[0])
            elif action == "finish":
                self.finish = arguments[0]
            elif action == "usage":
                self.usage = {"prompt_tokens": arguments[0], "completion_tokens": arguments[1]}
        said = {"message": {"role": "assistant", "content": self.whole_text}} if self.is_chat else {"text": self.whole_text}
        body = {"choices": [{"index": 0, "finish_reason": self.finish, **said}], "usage": self.usage}
        kept = await self.answer(200, body)
        self.note_text(len(self.whole_text))
        self.sent.ended_at = self.sent.texts[-1][0]
        return kept

    async def answer(self, status: int, body: dict[str, Any]) -> bool:
        data = json.dumps(body).encode()
        retry = f"\r\nRetry-After: {self.truth['retry_after']}" if "retry_after" in self.truth else ""
        self.write_head(status, "application/json", f"Content-Length: {len(data)}{retry}")
        self.writer.write(data)
        self.sent.ended_at = time.monotonic()
        return True

    def write_head(self, status: int, content_type: str, more: str) -> None:
        self.sent.headers_at = time.monotonic()
        self.writer.write(f"HTTP/1.1 {status} X\r\nServer: truth\r\nContent-Type: {content_type}\r\n{more}\r\n\r\n".encode())

    def write_chunk(self, data: bytes, *, ends_event: bool = True) -> None:
        if ends_event and self.sent.first_event_at is None:
            self.sent.first_event_at = time.monotonic()
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def note_text(self, num_chars: int) -> None:
        self.sent.texts.append((time.monotonic(), num_chars))

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = json.dumps({"id": "x", "object": "chunk", "choices": choices, **more}, ensure_ascii=False)
        return f"data: {body}{self.newline}{self.newline}".encode()

    def text_event(self, text: str) -> bytes:
        said = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self.event([{"index": 0, "finish_reason": None, **said}])

    async def do_text(self, text: str) -> None:
        data = self.text_event(text)
        self.note_text(len(text))
        self.write_chunk(data)

    async def do_merged(self, texts: list[str]) -> None:
        """Several events in one write."""
        data = b"".join(map(self.text_event, texts))
        for text in texts:
            self.note_text(len(text))
        self.write_chunk(data)

    async def do_dribble(self, text: str, num_pieces: int, gap_ms: float) -> None:
        """One event in several writes: lines, CRLF and UTF-8 are split anywhere."""
        data = self.text_event(text)
        cuts = [len(data) * place // num_pieces for place in range(num_pieces + 1)]
        for place in range(num_pieces):
            if place:
                await self.pause(gap_ms)
            is_last = place == num_pieces - 1
            if is_last:
                self.note_text(len(text))
            self.write_chunk(data[cuts[place] : cuts[place + 1]], ends_event=is_last)

    async def do_role(self) -> None:
        self.write_chunk(self.event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]))

    async def do_comment(self) -> None:
        self.write_chunk(b": ping" + 2 * self.newline.encode(), ends_event=False)

    async def do_finish(self, reason: str) -> None:
        self.write_chunk(self.event([{"index": 0, "delta": {}, "text": "", "finish_reason": reason}]))

    async def do_usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        if self.sent.asked_usage:
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
            self.write_chunk(self.event([], usage=usage))

    async def do_done(self) -> None:
        self.write_chunk(b"data: [DONE]" + 2 * self.newline.encode())

    async def do_error(self, message: str) -> None:
        data = json.dumps({"error": {"message": message, "type": "server_error", "code": 500}}).encode()
        self.write_chunk(b"data: " + data + 2 * self.newline.encode())

    async def do_raw(self, text: str) -> None:
        self.write_chunk(text.encode())


class Server:
    """Connections, and the routes /log and everything else."""

    def __init__(self) -> None:
        self.num_connections = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.answer_one(number, reader, writer):
                pass
        writer.close()

    async def answer_one(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        received_at = time.monotonic()
        method, path, _ = head[0].split(" ")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            reply = json.dumps([asdict(sent) for sent in LOG] if path == "/log" else {"data": []}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply)
            return True
        body = json.loads(data)
        sent = Sent(
            id=body["truth"]["id"],
            connection=number,
            received_at=received_at,
            asked_usage=body.get("stream_options", {}).get("include_usage", False),
            body={key: value for key, value in body.items() if key != "truth"},
            headers=headers,
        )
        LOG.append(sent)
        is_stream, is_chat = body.get("stream", False), path.endswith("/chat/completions")
        return await Script(body["truth"], sent, writer, is_stream=is_stream, is_chat=is_chat).play()


async def main() -> None:
    server = await asyncio.start_server(Server().connect, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # ends with the process that started it


if __name__ == "__main__":
    with contextlib.suppress(AttributeError, PermissionError):  # not everywhere, not for everybody
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    asyncio.run(main())
