"""A ring buffer of records in shared memory: one producer process, one consumer process, either of which may die at any moment.

Owns: the bytes of a ring and its cursors. Runs in: gateway and worker. Must not know: what a record means, how to wait.
Full and empty are told apart by cursors that only grow; a record is at cursor % capacity, and may be split by the end.

Why it survives a crash at any instruction: the producer writes a record and then, by one aligned 8-byte store, the write
cursor; the consumer copies a record and then, in the same way, stores the read cursor. Each cursor has one writer. A new
process of a side attaches and goes on from its cursor: a record is lost only if it was never published, and delivered once.
A consumer that died after try_pop had stored the cursor has taken that record with it: delivery is at most once.

Why it holds on a weakly ordered machine, where the cursor may be seen before the bytes: each record's checksum covers its
length, its bytes and its position (so that the bytes of an earlier lap do not pass). What does not check is not there yet.
In the other direction no barrier is needed: both sides store only after a branch on what they have loaded.
"""

import mmap
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

WritableBuffer = mmap.mmap | memoryview | bytearray

_MAGIC = 0x48_52_2D_52_49_4E_47_00  # "HR-RING\0"
_VERSION = 1
# The header is words of 8 bytes, in lines of 128 bytes: no machine's cache line (or pair of lines) has two writers.
_WORD_MAGIC, _WORD_VERSION, _WORD_CAPACITY, _WORD_MAX_RECORD = 0, 1, 2, 3
_WORD_WRITE, _WORD_PUSHED, _WORD_FULL = 16, 17, 18  # the producer's
_WORD_READ, _WORD_POPPED = 32, 33  # the consumer's
_HEADER_BYTES = 48 * 8
_RECORD_HEAD = struct.Struct("=II")  # length in bytes, checksum
_HEAD_BYTES = _RECORD_HEAD.size
_ALIGN = 8  # of records, so that a head never is split
_NUM_LOOKS = 64  # at a record that is not there yet, in one try_pop
_MAX_FAILED_POPS = 100  # in a row, before the ring is called corrupt (together a few milliseconds)


class RecordTooLarge(ValueError):  # noqa: N818 - reads as what it says
    """A record that this ring could not take even when empty, or that is over its limit."""


class RingCorrupt(RuntimeError):  # noqa: N818
    """What the header or a published record says cannot be. The consumer may discard_all(), and knows that records are lost."""


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Of one ring. Counts of records may be one short for each crash of the side that counts; `num_full`: pushes refused."""

    fill_bytes: int
    capacity_bytes: int
    num_pushed: int
    num_popped: int
    num_full: int

    @property
    def fill_ratio(self) -> float:
        """0 empty, 1 full."""
        return self.fill_bytes / self.capacity_bytes


class Ring:
    """One side's view of a ring. An object serves one thread, as producer or as consumer."""

    def __init__(self, base: memoryview) -> None:
        # A memoryview of format Q stores its 8 bytes in one go; struct.pack_into with a standard format goes byte by byte.
        self._base = base
        self._words = base[:_HEADER_BYTES].cast("Q")
        self._capacity = self._words[_WORD_CAPACITY]
        self._data = base[_HEADER_BYTES : _HEADER_BYTES + self._capacity]
        self._num_failed_pops = 0
        self.max_record_bytes = self._words[_WORD_MAX_RECORD]

    @staticmethod
    def size_bytes(capacity_bytes: int) -> int:
        """Size of the buffer for a ring of this capacity."""
        return _HEADER_BYTES + _rounded_up(capacity_bytes)

    @classmethod
    def create(cls, buffer: WritableBuffer, *, max_record_bytes: int | None = None) -> "Ring":
        """Make an empty ring of the whole buffer (at least 400 bytes). By default a record may be as large as the ring."""
        base = memoryview(buffer).cast("B")
        capacity = (len(base) - _HEADER_BYTES) // _ALIGN * _ALIGN
        if capacity < 2 * _ALIGN:
            raise ValueError(f"a buffer of {len(base)} bytes is too small for a ring")
        largest = capacity - _HEAD_BYTES
        if max_record_bytes is not None and not 0 < max_record_bytes <= largest:
            raise ValueError(f"max_record_bytes must lie between 1 and {largest}, not {max_record_bytes}")
        words = base[:_HEADER_BYTES].cast("Q")
        for index in range(len(words)):
            words[index] = 0
        words[_WORD_VERSION] = _VERSION
        words[_WORD_CAPACITY] = capacity
        words[_WORD_MAX_RECORD] = max_record_bytes or largest
        words[_WORD_MAGIC] = _MAGIC  # last: whoever sees it sees the rest
        words.release()
        return cls(base)

    @classmethod
    def attach(cls, buffer: WritableBuffer) -> "Ring":
        """The ring that is in the buffer. Raises RingCorrupt when there is none, or one of another version or size."""
        base = memoryview(buffer).cast("B")
        if len(base) < _HEADER_BYTES:
            raise RingCorrupt(f"a buffer of {len(base)} bytes holds no ring")
        with base[:_HEADER_BYTES].cast("Q") as words:
            if words[_WORD_MAGIC] != _MAGIC:
                raise RingCorrupt("no ring here: the magic number is missing")
            if words[_WORD_VERSION] != _VERSION:
                raise RingCorrupt(f"ring version {words[_WORD_VERSION]}; this program knows {_VERSION}")
            capacity, max_record = words[_WORD_CAPACITY], words[_WORD_MAX_RECORD]
            fits = capacity % _ALIGN == 0 and 0 < max_record <= capacity - _HEAD_BYTES
            if not fits or _HEADER_BYTES + capacity > len(base):
                raise RingCorrupt(f"a ring of {capacity} bytes in a buffer of {len(base)} bytes cannot be")
        return cls(base)

    def close(self) -> None:
        """Let go of the buffer (a mapping can be closed only then). Idempotent; the ring cannot be used afterwards."""
        for view in (self._words, self._data, self._base):
            view.release()

    # Producer.

    def try_push(self, record: bytes) -> bool:
        """Publish one record; False when there is no room now. Raises RecordTooLarge when there never can be."""
        return self.try_push_all((record,))

    def try_push_all(self, records: Sequence[bytes]) -> bool:
        """Publish all of them at once, or none (False when there is no room now).

        Raises RecordTooLarge when one is over max_record_bytes, or when together they are more than the ring holds.
        """
        needed = 0
        for record in records:
            if len(record) > self.max_record_bytes:
                raise RecordTooLarge(f"a record of {len(record)} bytes; this ring takes {self.max_record_bytes}")
            needed += _HEAD_BYTES + _rounded_up(len(record))
        if needed > self._capacity:
            raise RecordTooLarge(f"records of {needed} bytes together; this ring holds {self._capacity}")
        words = self._words
        cursor = words[_WORD_WRITE]
        if cursor + needed - words[_WORD_READ] > self._capacity:
            words[_WORD_FULL] += 1
            return False
        for record in records:
            cursor = self._write(cursor, record)
        words[_WORD_WRITE] = cursor  # published
        words[_WORD_PUSHED] += len(records)
        return True

    def _write(self, cursor: int, record: bytes) -> int:
        """Put the record at the cursor and return the cursor behind it."""
        data, capacity, length = self._data, self._capacity, len(record)
        offset = cursor % capacity
        _RECORD_HEAD.pack_into(data, offset, length, zlib.crc32(record, _seed(cursor, length)))
        start = offset + _HEAD_BYTES
        if start + length <= capacity:
            data[start : start + length] = record
        else:
            num_first = capacity - start
            data[start:] = record[:num_first]
            data[: length - num_first] = record[num_first:]
        return cursor + _HEAD_BYTES + _rounded_up(length)

    # Consumer.

    @property
    def has_records(self) -> bool:
        """Whether something is published that was not popped (it may be "not there yet" for a moment)."""
        return self._words[_WORD_WRITE] != self._words[_WORD_READ]

    def try_pop(self) -> bytes | None:
        """The oldest record; None when there is none, or when its bytes are not there yet.

        Raises RingCorrupt when they stay away over many calls, or at once when the cursors cannot be.
        """
        words = self._words
        cursor, end = words[_WORD_READ], words[_WORD_WRITE]
        if cursor == end:
            return None
        record = self._read(cursor, end)
        if record is None:
            self._num_failed_pops += 1
            if self._num_failed_pops >= _MAX_FAILED_POPS:
                raise RingCorrupt(f"the record at {cursor} does not match its checksum ({end - cursor} bytes wait)")
            return None
        self._num_failed_pops = 0
        words[_WORD_READ] = cursor + _HEAD_BYTES + _rounded_up(len(record))  # taken
        words[_WORD_POPPED] += 1
        return record

    def discard_all(self) -> int:
        """Drop what is published now: a new consumer does so with what was meant for the one before it.

        Returns how many records that were (those behind an unreadable one are dropped uncounted).
        """
        words = self._words
        cursor, end = words[_WORD_READ], words[_WORD_WRITE]
        num_records = 0
        while cursor < end <= cursor + self._capacity and (record := self._read(cursor, end)) is not None:
            cursor += _HEAD_BYTES + _rounded_up(len(record))
            num_records += 1
        self._num_failed_pops = 0
        words[_WORD_READ] = end
        words[_WORD_POPPED] += num_records
        return num_records

    def _read(self, cursor: int, end: int) -> bytes | None:
        """Copy the record at the cursor, or None when its bytes do not check after several looks."""
        if not 0 < end - cursor <= self._capacity:
            raise RingCorrupt(f"cursors {cursor} (read) and {end} (write) in a ring of {self._capacity} bytes")
        data, capacity = self._data, self._capacity
        offset = cursor % capacity
        start = offset + _HEAD_BYTES
        max_length = min(end - cursor - _HEAD_BYTES, self.max_record_bytes)
        for _ in range(_NUM_LOOKS):
            length, checksum = _RECORD_HEAD.unpack_from(data, offset)
            if length > max_length:
                continue
            if start + length <= capacity:
                record = bytes(data[start : start + length])
            else:
                record = bytes(data[start:]) + bytes(data[: start + length - capacity])
            if zlib.crc32(record, _seed(cursor, length)) == checksum:
                return record
        return None

    def statistics(self) -> RingStatistics:
        """Readable from either side, and from a third process."""
        words = self._words
        read = words[_WORD_READ]  # first: the write cursor, read later, is never behind it
        fill = min(words[_WORD_WRITE] - read, self._capacity)
        return RingStatistics(fill, self._capacity, words[_WORD_PUSHED], words[_WORD_POPPED], words[_WORD_FULL])


def _rounded_up(num_bytes: int) -> int:
    return (num_bytes + _ALIGN - 1) & -_ALIGN


def _seed(cursor: int, length: int) -> int:
    """Start value of a record's checksum, another one for each lap and length (to a CRC, zeros of any length look alike)."""
    return ((cursor // _ALIGN + 1) * 0x9E3779B1 ^ length) & 0xFFFFFFFF
