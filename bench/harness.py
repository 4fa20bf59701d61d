"""What the benchmark scripts share: a server as a child process, and a lean streaming client.

The client is plain asyncio over HTTP/1.1, so that on two cores it takes little from the server that it measures.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil

WORDS = """
river mill wheel water stone bridge valley forest morning evening winter summer light shadow house garden field road letter
story music paper engine signal number answer question reason measure balance market harbour island mountain season journey the
of and to in a that with from which would there their about other only time some could these may first then any like now
""".split()  # noqa: SIM905 - a list of 80 strings is no easier to read


MODEL_LABEL = re.compile(r'model_name="(?:[^"\\]|\\.)*",?')


@dataclasses.dataclass
class Server:
    """A running `headrace serve` and its processes."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    ready_seconds: float

    def child(self, part: str) -> psutil.Process:
        """The gateway or the worker process."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(part in word for word in process.cmdline()):
                    return process
        raise LookupError(f"no {part} process")

    @property
    def gateway(self) -> psutil.Process:
        return self.child("gateway_child")

    @property
    def worker(self) -> psutil.Process:
        return self.child("worker_child")

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (urllib.error.URLError, OSError) as error:
            return 0, str(error)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by `name{labels}`, without the label model_name; sums and counts by service class also in all."""
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = MODEL_LABEL.sub("", name).replace(",}", "}").replace("{}", "")
                found[name] = float(value)
                family, _, labels = name.partition("{")
                if labels.startswith("class=") and family.endswith(("_sum", "_count")):
                    found[family] = found.get(family, 0.0) + float(value)
        return found

    def wait_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.get("/health/ready")[0] != 200:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError("the server is not ready")
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    *flags: str, ready_within_seconds: float = 120, quiet: bool = True, log: pathlib.Path | None = None
) -> Iterator[Server]:
    """A server with these flags on a free port of this machine; stopped at the end. `log`: its errors' output goes there."""
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", "--port", str(port), *flags]
    started = time.monotonic()
    output = subprocess.DEVNULL if quiet else None
    with contextlib.nullcontext(output) if log is None else log.open("ab") as errors:
        process = subprocess.Popen(command, stderr=errors, stdout=output)
    server = Server(process, "127.0.0.1", port, 0.0)
    try:
        server.wait_ready(ready_within_seconds)
        server.ready_seconds = time.monotonic() - started
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclasses.dataclass
class Reply:
    """What came back for one request. Stamps are seconds of the monotonic clock."""

    status: int = 0
    sent: float = 0.0
    ended: float = 0.0
    stamps: list[float] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    num_done: int = 0
    num_errors: int = 0
    body: str = ""
    fault: str = ""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        if chunked:
            size = int((await reader.readline()).strip() or b"0", 16)
            data = await reader.readexactly(size) if size else b""
            await reader.readline()
        else:
            data = await reader.read(65536)
        if not data:
            break
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def post(
    server: Server,
    path: str,
    body: dict[str, Any],
    leave_after: int | None = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """POST one body; with "stream": true events are stamped. `leave_after`: close the connection after so many texts."""
    payload = json.dumps(body).encode()
    reply = Reply(sent=time.monotonic())
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: {server.host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        writer.write(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        status_line = await reader.readline()
        reply.status = int(status_line.split()[1])
        chunked = False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            chunked = chunked or b"chunked" in line.lower()
            name, _, value = line.decode("latin-1").partition(":")
            reply.headers[name.strip().lower()] = value.strip()
        async for line in _lines(reader, chunked):
            if not line.startswith(b"data: "):
                reply.body += line.decode() if not line.startswith(b":") else ""
                continue
            if line == b"data: [DONE]":
                reply.num_done += 1
                continue
            _take(reply, json.loads(line[6:]))
            if leave_after is not None and len(reply.texts) >= leave_after:
                break
    except (ConnectionError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
        reply.fault = repr(error)
    finally:
        reply.ended = time.monotonic()
        writer.close()
    return reply


def _take(reply: Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        reply.num_errors += 1
        reply.body = json.dumps(event)
        return
    reply.usage = event.get("usage") or reply.usage
    for choice in event.get("choices", []):
        text = choice.get("text") or choice.get("delta", {}).get("content")
        if text:
            reply.stamps.append(time.monotonic())
            reply.texts.append(text)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason


async def closed_loop(
    server: Server, bodies: list[dict[str, Any]], num_clients: int, path: str = "/v1/completions"
) -> list[Reply]:
    """So many clients, each with one request at a time, until all bodies are sent."""
    waiting = list(reversed(bodies))
    replies: list[Reply] = []

    async def client() -> None:
        while waiting:
            replies.append(await post(server, path, waiting.pop()))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return replies


def random_prompt(rng: random.Random, num_words: int) -> str:
    """Words that no earlier prompt began with, so that no prefix is shared."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process so far."""
    times = process.cpu_times()
    return times.user + times.system


def resident_mib(process: psutil.Process) -> float:
    """Resident memory of a process."""
    return process.memory_info().rss / 2**20


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def shared_memory_files() -> list[str]:
    """Headrace's files in /dev/shm."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith("headrace-")) if os.path.isdir("/dev/shm") else []
