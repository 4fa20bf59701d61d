"""What the coordinating process and its client processes say to each other, over a pair of sockets.

Owns: the messages and their frames. Runs in: load tool, both kinds of process. Must not know: HTTP, figures.
A frame is a length (4 bytes, big-endian) and a MessagePack map. A key to the server travels here, never in the arguments.
"""

import asyncio
import struct

import msgspec

from headrace.loadtest.records import RequestRecord

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30


class WireRequest(msgspec.Struct, array_like=True):
    """A planned request with its body encoded."""

    index: int
    due: float | None
    group: str
    body: bytes
    target_prompt_tokens: int | None
    target_output_tokens: int | None
    think_seconds: float
    headers: dict[str, str] = {}
    then: list["WireRequest"] = []

    @property
    def num_bytes(self) -> int:
        """Of all its bodies."""
        return len(self.body) + sum(turn.num_bytes for turn in self.then)


def unsent_record(request: WireRequest, *, process: int, is_stream: bool, at: float) -> RequestRecord:
    """Of an open loop's request that was due, and still waited in the load tool when the run was ended at `at`."""
    return RequestRecord(
        index=request.index,
        process=process,
        group=request.group,
        is_stream=is_stream,
        scheduled=at if request.due is None else request.due,
        sent=at,
        error_kind="not_sent",
        error_detail="due, and still waiting in the load tool when the run was ended",
        target_prompt_tokens=request.target_prompt_tokens,
        target_output_tokens=request.target_output_tokens,
    )


class Setup(msgspec.Struct, tag=True, kw_only=True):
    """First message to a client process."""

    process: int
    url: str
    warm_url: str
    headers: dict[str, str]
    is_stream: bool
    num_clients: int | None  # None: open loop
    num_warm_connections: int
    max_outstanding: int
    duration_seconds: float | None
    timeout_seconds: float
    opens_new_connections: bool


class Feed(msgspec.Struct, tag=True):
    """More to send, in order of due time."""

    requests: list[WireRequest]


class NoMore(msgspec.Struct, tag=True):
    """The plan is at its end: finish what you have, then say Bye."""


class Start(msgspec.Struct, tag=True):
    """Time zero of the run, on the machine's monotonic clock."""

    at_monotonic: float


class Stop(msgspec.Struct, tag=True):
    """End now: what is under way is UNFINISHED. Then say Bye."""


class Ready(msgspec.Struct, tag=True):
    """Connections are open, the first requests are here."""

    environment: dict[str, str]


class Unreachable(msgspec.Struct, tag=True):
    """No connection to the server could be made. The process ends after it."""

    detail: str


class Update(msgspec.Struct, tag=True, kw_only=True):
    """What happened since the last update. `num_taken`, `num_taken_bytes`: of fed conversations, so that more can be fed."""

    at_monotonic: float
    cpu_seconds: float  # of the process, since its start
    records: list[RequestRecord]
    num_taken: int
    num_taken_bytes: int
    num_sent: int  # since the start, as the next two
    num_running: int
    num_texts: int
    num_held: int  # sent late because of max_outstanding, since the start
    send_lags: list[tuple[float, float]]  # (time of the run, lateness)
    loop_lags: list[tuple[float, float]]


class Bye(msgspec.Struct, tag=True):
    """Last message of a process that did all its work."""

    server_header: str
    asks_usage: bool


ToClient = Setup | Feed | NoMore | Start | Stop
ToCoordinator = Ready | Unreachable | Update | Bye

_encode = msgspec.msgpack.Encoder().encode
_decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
_decode_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode


async def send(writer: asyncio.StreamWriter, message: ToClient | ToCoordinator) -> None:
    """Write one message. ConnectionError when the other side is gone."""
    data = _encode(message)
    writer.write(_LENGTH.pack(len(data)) + data)
    await writer.drain()


async def receive_to_client(reader: asyncio.StreamReader) -> ToClient | None:
    """The next message in a client process; None when the coordinating process is gone."""
    data = await _receive(reader)
    return None if data is None else _decode_to_client(data)


async def receive_to_coordinator(reader: asyncio.StreamReader) -> ToCoordinator | None:
    """The next message from a client process; None when it is gone."""
    data = await _receive(reader)
    return None if data is None else _decode_to_coordinator(data)


async def _receive(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if num_bytes > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {num_bytes} bytes: the pipe carries something else")
        return await reader.readexactly(num_bytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
