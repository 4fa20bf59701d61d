"""Recording: lines of traffic and steps, appended to one file by several processes.

Owns: create_record, Recorder, GatewayRecording, the salted hashes of prompts. Runs in: supervisor (create), gateway, worker.
Must not know: rings, HTTP, what a reader makes of a record. docs/record.md describes the file.

A disk that is full costs lines, which are counted, and never a request. Writes go to the system's page cache, at most some a
second; nothing waits for the disk itself.
"""

import asyncio
import hashlib
import os
import secrets
import stat
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.record import (
    BLOCK_TOKENS,
    RecordArrival,
    RecordEnd,
    RecordHeader,
    RecordLine,
    RecordTarget,
)
from headrace.protocol.traffic import OTHER_TENANT, TrafficPolicy
from headrace.telemetry.logs import get_logger
from headrace.telemetry.snapshot import RequestIdentity, TimelineSnapshot

DEFAULT_MAX_BYTES = 1 << 30
FLUSH_BYTES = 64 * 1024
FLUSH_NS = 500_000_000
HASH_BITS = 53  # exact as a number in every reader of JSON
_DIGEST_BYTES = 8
_SALT_BYTES = 16
_NS_PER_US = 1000

log = get_logger("record")


def check_record_path(path: str | Path) -> None:
    """Raise ConfigurationError where `create_record` would, as far as can be told without writing anything."""
    absolute = Path(path).expanduser().absolute()
    try:
        try:
            found = absolute.stat()
        except FileNotFoundError:
            if not absolute.parent.is_dir():
                raise ConfigurationError(
                    f"The record {absolute} cannot be created: there is no folder {absolute.parent}."
                ) from None
            place = absolute.parent
        else:
            _check_is_new(absolute, found)
            place = absolute
        if not os.access(place, os.W_OK):
            raise ConfigurationError(f"The record {absolute} cannot be created: {place} cannot be written.")
    except OSError as error:
        raise ConfigurationError(f"The record {absolute} cannot be created: {error.strerror or error}.") from error


def _check_is_new(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{path} is no regular file: a record cannot be written to it.")
    if found.st_size:
        raise ConfigurationError(
            f"{path} exists and is not empty: a record is never overwritten. Name another file, or move it away."
        )


def create_record(path: str | Path, header: RecordHeader, max_bytes: int = DEFAULT_MAX_BYTES) -> RecordTarget:
    """Create the file with its first line, readable by its owner alone, and draw its salt.

    Raises ConfigurationError when there is a record (or anything else) already, or the file cannot be written.
    """
    absolute = Path(path).expanduser().absolute()
    line = msgspec.json.encode(header) + b"\n"
    try:
        descriptor = os.open(absolute, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        try:
            _check_is_new(absolute, os.fstat(descriptor))
            if os.write(descriptor, line) != len(line):
                os.ftruncate(descriptor, 0)
                raise ConfigurationError(f"The disk of {absolute} is full: a record cannot be begun.")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(f"The record {absolute} cannot be created: {error.strerror or error}.") from error
    return RecordTarget(str(absolute), secrets.token_hex(_SALT_BYTES), header.started_monotonic_ns, max_bytes)


class Recorder:
    """Appends lines of one process to a record. One thread. Whole lines go out by single writes with O_APPEND.

    So lines of two processes do not mix (POSIX: the offset is set to the end and the data written as one operation; a network
    file system may not keep that). A fault of the disk, or the record's full size, ends the recording of this process: it is
    logged once, and further lines are counted as dropped. `max_bytes` is compared with the file's size before each write.
    """

    def __init__(self, target: RecordTarget, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Opens the file, which must be there. Never raises OSError: without a file every line is a dropped one."""
        self.num_lines = 0  # written to the file
        self.num_drops = 0  # not written
        self.started_ns = target.started_monotonic_ns
        self._path = target.path
        self._max_bytes = target.max_bytes
        self._clock_ns = clock_ns
        self._encode_into = msgspec.json.Encoder().encode_into
        self._buffer = bytearray()
        self._num_waiting = 0  # lines in the buffer
        self._due_ns = 0  # when the buffer's first line is to be on the disk
        self._descriptor = -1
        try:
            self._descriptor = os.open(target.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            log.error(  # noqa: TRY400 - the traceback tells nothing
                "the record cannot be opened; nothing is recorded", path=target.path, error=str(error)
            )

    @property
    def is_open(self) -> bool:
        """Whether lines are still recorded: when not, a caller may spare itself the making of them."""
        return self._descriptor >= 0

    def at_us(self, at_ns: int) -> int:
        """A moment of CLOCK_MONOTONIC as the record counts it."""
        return (at_ns - self.started_ns) // _NS_PER_US

    def write(self, line: RecordLine) -> None:
        """Add a line. It is on the disk when 64 KiB are waiting, or at the first call after half a second."""
        if self._descriptor < 0:
            self.num_drops += 1
            return
        buffer = self._buffer
        now_ns = self._clock_ns()
        if not buffer:
            self._due_ns = now_ns + FLUSH_NS
        self._encode_into(line, buffer, -1)
        buffer += b"\n"
        self._num_waiting += 1
        if len(buffer) >= FLUSH_BYTES or now_ns >= self._due_ns:
            self.flush()

    def flush_due(self, now_ns: int) -> None:
        """Write out what has waited for half a second. For a process that is about to sleep, and for timers."""
        if self._buffer and now_ns >= self._due_ns:
            self.flush()

    def flush(self) -> None:
        """Write out what waits."""
        if not self._buffer or self._descriptor < 0:
            return
        try:
            size = os.fstat(self._descriptor).st_size
            if size + len(self._buffer) > self._max_bytes:
                self._end("the record has its full size; nothing more is recorded", max_bytes=self._max_bytes)
                return
            self._end_cut_line(size)
            self._append()
        except OSError as error:
            self._end("the record cannot be written; nothing more is recorded", error=str(error))
            return
        self._buffer.clear()

    def close(self) -> None:
        """Write out what waits and close the file. Lines after it are dropped ones."""
        self.flush()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _end_cut_line(self, size: int) -> None:
        """A process that was killed within its write left a line without end: ours must not go on in it."""
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def _append(self) -> None:
        """Write the buffer, and count the lines that are in the file whatever happens. Raises OSError."""
        num_written = 0
        try:
            num_written = os.write(self._descriptor, self._buffer)
            while num_written < len(self._buffer):  # the disk is nearly full: the rest, or the error that says so
                num_written += os.write(self._descriptor, memoryview(self._buffer)[num_written:])
        finally:
            # A line of which the end alone is missing is whole: the next writer adds that (see _end_cut_line).
            num_lines = self._buffer.count(b"\n", 0, num_written + 1)
            self.num_lines += num_lines
            self._num_waiting -= num_lines

    def _end(self, event: str, **fields: object) -> None:
        self.num_drops += self._num_waiting
        self._num_waiting = 0
        self._buffer = bytearray()
        descriptor, self._descriptor = self._descriptor, -1
        log.error(event, path=self._path, num_lines=self.num_lines, **fields)
        os.close(descriptor)


class PromptHasher:
    """Hashes of a prompt's beginnings: one for each full block, of all tokens up to the block's end.

    BLAKE2b (RFC 7693) keyed with the record's salt, so that nobody without it can try out prompts; the salt is not in the
    record. `cache_salt` goes in first, with its length: prompts that must not share a cache do not look alike here either.
    """

    def __init__(self, salt: str, block_tokens: int) -> None:
        self._keyed = hashlib.blake2b(key=bytes.fromhex(salt), digest_size=_DIGEST_BYTES)
        self._block_tokens = block_tokens

    def hashes(self, token_ids: Sequence[int], cache_salt: str = "") -> list[int]:
        """len(token_ids) // block_tokens integers of HASH_BITS bits."""
        num_blocks = len(token_ids) // self._block_tokens
        if num_blocks == 0:
            return []
        state = self._keyed.copy()
        salt = cache_salt.encode("utf-8", "surrogatepass")
        state.update(len(salt).to_bytes(8, "big") + salt)
        tokens = array("I", token_ids)
        size = self._block_tokens * tokens.itemsize
        data = memoryview(tokens).cast("B")
        found = []
        for end in range(size, num_blocks * size + 1, size):
            state.update(data[end - size : end])
            found.append(int.from_bytes(state.digest(), "big") >> (8 * _DIGEST_BYTES - HASH_BITS))
        return found


class GatewayRecording:
    """The listener that records a gateway's requests: an arrival for each, an end for each that was accepted."""

    def __init__(
        self,
        target: RecordTarget,
        traffic: TrafficPolicy,
        *,
        gateway: int,
        first_request_id: int,
        block_tokens: int = BLOCK_TOKENS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`gateway`: the incarnation; `first_request_id`: the first number that it gives to a request."""
        self.recorder = Recorder(target, clock_ns)
        self._clock_ns = clock_ns
        self._gateway = gateway
        self._first_request_id = first_request_id
        self._hasher = PromptHasher(target.salt, block_tokens)
        self._class_indices = {name: index for index, name in enumerate(traffic.class_names)}
        self._default_class = self._class_indices[traffic.default_class]
        self._tenant_indices = {name: index for index, name in enumerate(traffic.tenant_names)}
        self._other_tenant = self._tenant_indices[OTHER_TENANT]
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have what waits written out every half second, also when no request comes."""
        self._timer = loop.call_later(FLUSH_NS / 1e9, self._on_timer, loop)

    def close(self) -> None:
        """Write out what waits, and end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.recorder.close()

    def on_accepted(
        self,
        identity: RequestIdentity,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        deadline_ns: int = 0,
        cache_salt: str = "",
    ) -> None:
        """A request has a number and is on its way to the worker. `deadline_ns`: 0 for none."""
        timeout_us = max(1, (deadline_ns - arrival_ns) // _NS_PER_US) if deadline_ns else 0
        self._arrival(identity, self._id(identity), arrival_ns, prompt_token_ids, cache_salt, timeout_us, "")

    def on_refused(
        self,
        identity: RequestIdentity,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        error_code: str,
        cache_salt: str = "",
    ) -> None:
        """A request was turned away. `error_code`: the wire code."""
        self._arrival(identity, 0, arrival_ns, prompt_token_ids, cache_salt, 0, error_code)

    def on_finished(self, snapshot: TimelineSnapshot) -> None:
        """An accepted request ended, in whatever way."""
        recorder, stamps = self.recorder, snapshot.stamps
        began_ns = stamps.received_ns

        def since(at_ns: int) -> int:
            return max(0, at_ns - began_ns) // _NS_PER_US if at_ns else -1

        recorder.write(
            RecordEnd(
                at_us=recorder.at_us(stamps.end_ns),
                id=self._id(snapshot.identity),
                gateway=self._gateway,
                output_tokens=snapshot.num_output_tokens,
                cached_tokens=snapshot.num_cached_tokens,
                preemptions=snapshot.num_preemptions,
                reason=snapshot.finished_reason,
                queue_us=since(stamps.first_scheduled_ns),
                ttft_us=since(stamps.first_token_ns),
                last_token_us=since(stamps.last_token_ns) if stamps.first_token_ns else -1,
            )
        )

    def _id(self, identity: RequestIdentity) -> int:
        return identity.request_id - self._first_request_id + 1

    def _arrival(
        self,
        identity: RequestIdentity,
        number: int,
        arrival_ns: int,
        prompt_token_ids: Sequence[int],
        cache_salt: str,
        timeout_us: int,
        refused: str,
    ) -> None:
        recorder = self.recorder
        if not recorder.is_open:  # the hashes of a prompt that nobody writes down are spared
            recorder.num_drops += 1
            return
        recorder.write(
            RecordArrival(
                at_us=recorder.at_us(arrival_ns),
                id=number,
                gateway=self._gateway,
                class_index=self._class_indices.get(identity.service_class, self._default_class),
                tenant_index=self._tenant_indices.get(identity.tenant, self._other_tenant),
                priority=identity.priority,
                prompt_tokens=identity.num_prompt_tokens,
                max_tokens=identity.max_tokens,
                timeout_us=timeout_us,
                refused=refused,
                blocks=self._hasher.hashes(prompt_token_ids, cache_salt),
            )
        )

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self.recorder.flush_due(self._clock_ns())
        self._timer = loop.call_later(FLUSH_NS / 1e9, self._on_timer, loop)
