"""Opens a GGUF file safely: metadata as a plain dict, weights by name as float32.

Owns: the GGUF format and the gguf package. Runs in: launch, before serving. Must not know: architectures, graphs.
"""

import contextlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
from numpy.typing import NDArray

from headrace.protocol.errors import ModelError

MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_NAME_BYTES = 256
MAX_DIMENSION = 1 << 31
MAX_ELEMENTS = 1 << 36
MAX_NESTED_ARRAYS = 2
CHUNK_ELEMENTS = 1 << 22  # dequantized at a time: bounds the temporaries of the gguf package

# GGUF value types, by number: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
MIN_STRING_BYTES, MIN_ARRAY_BYTES, MIN_TENSOR_BYTES, MIN_PAIR_BYTES = 8, 12, 32, 13


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is outermost first, as numpy has it; `offset_bytes` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset_bytes: int
    num_bytes: int


class GgufFile:
    """A GGUF file whose header was checked in full: no count, length or offset in it can reach beyond the file."""

    def __init__(self, path: Path, view: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._view = view

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read and check the header. Raises ModelError for what is no sound GGUF file, before anything large is allocated."""
        try:
            with path.open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path}: cannot be read: {error}") from error
        try:
            metadata, tensors = _Header(view, path).read()
        except BaseException:
            view.close()
            raise
        return cls(path, view, metadata, tensors)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first. Raises ModelError when there is none of that name."""
        return self._info(name).shape

    def weight(self, name: str) -> NDArray[np.float32]:
        """The tensor, dequantized. Raises ModelError for a missing name or a quantization that cannot be undone."""
        info = self._info(name)
        row_elements = info.shape[-1]
        num_rows = int(np.prod(info.shape)) // row_elements
        raw = np.frombuffer(self._view, np.uint8, info.num_bytes, info.offset_bytes).reshape(num_rows, -1)
        result = np.empty((num_rows, row_elements), np.float32)
        step = max(1, CHUNK_ELEMENTS // row_elements)
        for start in range(0, num_rows, step):
            try:
                result[start : start + step] = gguf.dequantize(raw[start : start + step], info.kind)
            except NotImplementedError as error:
                raise ModelError(f"{self.path}: tensor {name} is stored as {info.kind.name}, which cannot be read.") from error
        return result.reshape(info.shape)

    def close(self) -> None:
        """Give back the mapping. Arrays that weight() returned stay valid: they are copies."""
        with contextlib.suppress(BufferError):  # an exception on its way up still holds a view; the mapping goes with it
            self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: tensor {name} is missing.")
        return info


class _Header:
    """Walks the header once. Every length is compared with what is left of the file before it is used."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view = view
        self._path = path
        self._at = 0
        self._end = len(view)

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """The metadata and the tensors' places."""
        if self._take(4) != b"GGUF":
            raise self._fault("does not begin with the letters GGUF")
        (version,) = struct.unpack("<I", self._take(4))
        if version not in (2, 3):
            raise self._fault(f"has GGUF version {version}; versions 2 and 3 (little-endian) can be read")
        num_tensors, num_pairs = self._count("tensors", MIN_TENSOR_BYTES), self._count("metadata pairs", MIN_PAIR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self._fault(f"has the metadata key {key[:80]!r} twice")
            metadata[key] = self._value(self._uint32(), key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise self._fault(f"has the alignment {alignment!r}, which is no power of two")
        entries = [self._tensor() for _ in range(num_tensors)]
        data_start = -(-self._at // alignment) * alignment
        return metadata, {info.name: info for info in self._placed(entries, data_start, alignment)}

    def _tensor(self) -> TensorInfo:
        name = self._string(MAX_NAME_BYTES)
        num_dimensions = self._uint32()
        if not 1 <= num_dimensions <= 4:
            raise self._fault(f"gives tensor {name!r} {num_dimensions} dimensions")
        dimensions = struct.unpack(f"<{num_dimensions}Q", self._take(8 * num_dimensions))
        if not all(1 <= size <= MAX_DIMENSION for size in dimensions):
            raise self._fault(f"gives tensor {name!r} the impossible shape {list(dimensions)}")
        num_elements = 1
        for size in dimensions:
            num_elements *= size
        kind_number, (offset,) = self._uint32(), struct.unpack("<Q", self._take(8))
        try:
            kind = gguf.GGMLQuantizationType(kind_number)
        except ValueError:
            raise self._fault(f"stores tensor {name!r} in the unknown type {kind_number}") from None
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if num_elements > MAX_ELEMENTS or dimensions[0] % block_elements:
            raise self._fault(f"gives tensor {name!r} the shape {list(dimensions)}, impossible for {kind.name}")
        num_bytes = num_elements // block_elements * block_bytes
        return TensorInfo(name, tuple(reversed(dimensions)), kind, offset, num_bytes)

    def _placed(self, entries: list[TensorInfo], data_start: int, alignment: int) -> Iterator[TensorInfo]:
        """The tensors with offsets from the file's start, in file order. Refuses what lies outside, overlaps or repeats."""
        seen: set[str] = set()
        free_from = 0
        for info in sorted(entries, key=lambda entry: entry.offset_bytes):
            if info.name in seen:
                raise self._fault(f"has the tensor {info.name!r} twice")
            if info.offset_bytes % alignment or info.offset_bytes < free_from:
                raise self._fault(f"places tensor {info.name!r} at offset {info.offset_bytes}, across another or unaligned")
            free_from = info.offset_bytes + info.num_bytes
            if data_start + free_from > self._end:
                raise self._fault(f"ends before tensor {info.name!r} does: the file is cut short or damaged")
            seen.add(info.name)
            yield TensorInfo(info.name, info.shape, info.kind, data_start + info.offset_bytes, info.num_bytes)

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(key, depth)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth >= MAX_NESTED_ARRAYS:
            raise self._fault(f"nests arrays too deep in {key[:80]!r}")
        kind = self._uint32()
        if kind == STRING:
            return [self._string() for _ in range(self._count(key, MIN_STRING_BYTES, MAX_ARRAY_ITEMS))]
        if kind == ARRAY:
            count = self._count(key, MIN_ARRAY_BYTES, MAX_ARRAY_ITEMS)
            return [self._array(key, depth + 1) for _ in range(count)]
        return self._scalars(kind, self._count(key, 1, MAX_ARRAY_ITEMS), key)

    def _scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in SCALARS:
            raise self._fault(f"has the unknown value type {kind} in {key[:80]!r}")
        dtype = np.dtype(SCALARS[kind])
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values

    def _string(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        if length > max_bytes:
            raise self._fault(f"claims a string of {length} bytes")
        # Tokens of damaged vocabularies hold bytes that are no UTF-8; the tokenizer, not the file format, judges them.
        return self._take(length).decode("utf-8", errors="replace")

    def _count(self, what: str, min_item_bytes: int, most: int = MAX_ARRAY_ITEMS) -> int:
        (count,) = struct.unpack("<Q", self._take(8))
        if count > most or count * min_item_bytes > self._end - self._at:
            raise self._fault(f"claims {count} items of {what[:80]!r}, more than it can hold")
        return int(count)

    def _uint32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def _take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > self._end:
            raise self._fault("ends within its header: the file is cut short or damaged")
        if self._at > MAX_HEADER_BYTES:
            raise self._fault(f"has a header of more than {MAX_HEADER_BYTES >> 20} MiB")
        return self._view[start : self._at]

    def _fault(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is no sound GGUF file: it {what}.")
