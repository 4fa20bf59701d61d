"""A Hugging Face folder's safetensors files as weights by name in float32, without torch.

Owns: the safetensors package and format. Runs in: launch, before serving. Must not know: architectures, graphs.
"""

import contextlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from headrace.models.huggingface_folder import read_json
from headrace.protocol.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class _Tensor:
    view: mmap.mmap
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


class SafetensorsFolder:
    """Tensors of all shards. Where there is an index it alone decides which shard a tensor is read from."""

    def __init__(self, folder: Path, tensors: dict[str, _Tensor], views: list[mmap.mmap]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._views = views

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Check and map the files. Raises ModelError when one is missing, cut short or contradicts the index."""
        opened = cls(folder, {}, [])
        try:
            for path, wanted in _shards(folder).items():
                opened._add(path, wanted)
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelError when there is none of that name."""
        return self._tensor(name).shape

    def weight(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32. Raises ModelError for a missing name or a type that is no float of 16 or 32 bits."""
        tensor = self._tensor(name)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise ModelError(f"{tensor.path}: tensor {name} is stored as {tensor.dtype}; F32, F16 and BF16 can be read.")
        count = int(np.prod(tensor.shape, dtype=np.int64))
        raw: NDArray[Any] = np.frombuffer(tensor.view, dtype, count, tensor.offset_bytes).reshape(tensor.shape)
        if tensor.dtype == "BF16":  # the upper half of a float32
            widened: NDArray[np.uint32] = raw.astype(np.uint32)
            widened <<= 16
            return widened.view(np.float32)
        floats: NDArray[np.float32] = raw.astype(np.float32)
        return floats

    def close(self) -> None:
        """Give back the mappings. Arrays that weight() returned stay valid: they are copies."""
        for view in self._views:
            with contextlib.suppress(BufferError):  # an exception on its way up still holds a view; the mapping goes with it
                view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tensor(self, name: str) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._folder}: tensor {name} is missing.")
        return tensor

    def _add(self, path: Path, wanted: frozenset[str] | None) -> None:
        """Take up one shard: the tensors that the index wants from it, or all."""
        try:
            with safe_open(path, framework="numpy"):  # refuses headers that lie about sizes, gaps, overlaps
                pass
            with path.open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{path} is no sound safetensors file: {error}") from error
        self._views.append(view)
        (header_bytes,) = struct.unpack("<Q", view[:8])
        if header_bytes > min(MAX_HEADER_BYTES, len(view) - 8):
            raise ModelError(f"{path} is no sound safetensors file: it claims a header of {header_bytes} bytes.")
        header = msgspec.json.decode(view[8 : 8 + header_bytes], type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        missing = sorted((wanted or frozenset()) - header.keys())
        if missing:
            raise ModelError(f"{path}: the index places tensor {missing[0]} in it, but it is not there.")
        for name in header.keys() if wanted is None else wanted:
            entry = header[name]
            begin = 8 + header_bytes + entry["data_offsets"][0]
            self._tensors[name] = _Tensor(view, path, entry["dtype"], tuple(entry["shape"]), begin)


def _shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Files to read, each with the names that the index wants from it; None: all."""
    index = folder / INDEX_FILE
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        single = folder / "model.safetensors"
        if single in files:
            return {single: None}
        if len(files) != 1:
            raise ModelError(f"{folder} holds {len(files)} .safetensors files and no {INDEX_FILE} that says which to read.")
        return {files[0]: None}
    placed: dict[Path, set[str]] = {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise ModelError(f"{index} places tensor {name} in {str(file)[:80]!r}, which is no file of the folder.")
        placed.setdefault(folder / file, set()).add(name)
    return {path: frozenset(names) for path, names in placed.items()}
