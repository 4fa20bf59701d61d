"""The status page: the worker's numbers in shared memory, for anyone to read at any moment.

Owns: a table of named int64 fields. Runs in: worker (writes), gateway and supervisor (read). Must not know: what they mean.
Two copies and a counter of writes: a copy is written while the other stands, so a writer that dies leaves a whole one behind.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from operator import itemgetter

from headrace.ipc.ring import WritableBuffer

_MAGIC = 0x48_52_2D_50_41_47_45_00  # "HR-PAGE\0"
_VERSION = 1
_HEADER = struct.Struct("=QIIQ")  # magic, version, checksum of the names, padding in place of the counter
_HEADER_BYTES = 128
_WORD_NUM_WRITES = 8  # in words of 8 bytes: a cache line after the constants
_NUM_LOOKS = 100


class StatusPageError(RuntimeError):
    """No page of these fields is here, or it could not be read whole in many looks."""


class StatusPage:
    """One process writes, any number read. A reader never sees a mixture of two writes.

    The counter of writes says which copy stands (its parity). A reader that copied while the counter stood still has
    a copy that nobody wrote to; the checksum, which covers the counter, is for machines that reorder stores.
    """

    def __init__(self, base: memoryview, names: Sequence[str]) -> None:
        self._base = base
        self._names = tuple(names)
        self._words = base[:_HEADER_BYTES].cast("Q")
        self._values = struct.Struct(f"={len(self._names)}q")
        self._copy = struct.Struct(f"=I4x{len(self._names)}q")
        self._pick = itemgetter(*self._names) if len(self._names) > 1 else None

    @staticmethod
    def size_bytes(names: Sequence[str]) -> int:
        """Size of the buffer for these fields."""
        return _HEADER_BYTES + 2 * _stride(len(names))

    @classmethod
    def create(cls, buffer: WritableBuffer, names: Sequence[str]) -> "StatusPage":
        """Make a page on which all fields are 0. Raises ValueError for a buffer that is too small or names that repeat."""
        base = memoryview(buffer).cast("B")
        if not names or len(set(names)) != len(names):
            raise ValueError("a status page needs names, each once")
        if len(base) < cls.size_bytes(names):
            raise ValueError(f"{len(names)} fields need {cls.size_bytes(names)} bytes, not {len(base)}")
        page = cls(base, names)
        page._words[_WORD_NUM_WRITES] = 0
        page._store(0, (0,) * len(names))
        _HEADER.pack_into(base, 0, _MAGIC, _VERSION, _names_checksum(names), 0)
        return page

    @classmethod
    def attach(cls, buffer: WritableBuffer, names: Sequence[str]) -> "StatusPage":
        """The page in the buffer. Raises StatusPageError when there is none, or one of other fields."""
        base = memoryview(buffer).cast("B")
        if len(base) < cls.size_bytes(names):
            raise StatusPageError(f"a buffer of {len(base)} bytes holds no page of {len(names)} fields")
        magic, version, checksum, _ = _HEADER.unpack_from(base, 0)
        if (magic, version, checksum) != (_MAGIC, _VERSION, _names_checksum(names)):
            raise StatusPageError("no status page here, or one with other fields")
        return cls(base, names)

    @property
    def names(self) -> tuple[str, ...]:
        """The fields, in their order."""
        return self._names

    def write(self, values: Mapping[str, int]) -> None:
        """Replace all fields at once. Raises KeyError for a field without a value, struct.error for one beyond 64 bits."""
        picked = self._pick(values) if self._pick is not None else (values[self._names[0]],)
        num_writes = self._words[_WORD_NUM_WRITES] + 1
        self._store(num_writes, picked)
        self._words[_WORD_NUM_WRITES] = num_writes

    def read(self) -> dict[str, int]:
        """All fields as of one write. Raises StatusPageError if no whole copy is seen in many looks."""
        words = self._words
        for _ in range(_NUM_LOOKS):
            num_writes = words[_WORD_NUM_WRITES]
            offset = self._offset(num_writes)
            copied = bytes(self._base[offset : offset + self._copy.size])
            if words[_WORD_NUM_WRITES] != num_writes:
                continue
            checksum, *values = self._copy.unpack(copied)
            if zlib.crc32(copied[8:], num_writes & 0xFFFFFFFF) == checksum:
                return dict(zip(self._names, values, strict=True))
        raise StatusPageError(f"no whole copy of the status page in {_NUM_LOOKS} looks")

    def close(self) -> None:
        """Let go of the buffer (a mapping can be closed only then). Idempotent; the page cannot be used afterwards."""
        self._words.release()
        self._base.release()

    def _store(self, num_writes: int, values: Sequence[int]) -> None:
        checksum = zlib.crc32(self._values.pack(*values), num_writes & 0xFFFFFFFF)
        self._copy.pack_into(self._base, self._offset(num_writes), checksum, *values)

    def _offset(self, num_writes: int) -> int:
        return _HEADER_BYTES + (num_writes & 1) * _stride(len(self._names))


def _stride(num_fields: int) -> int:
    """Bytes from one copy to the next, whole pairs of cache lines."""
    return (8 + 8 * num_fields + 127) // 128 * 128


def _names_checksum(names: Sequence[str]) -> int:
    return zlib.crc32("\n".join(names).encode())
