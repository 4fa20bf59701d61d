"""Safetensors folders: the index decides, damaged shards are refused, half floats are widened exactly."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.models.safetensors_folder import INDEX_FILE, SafetensorsFolder
from headrace.protocol.errors import ModelError


def raw_file(path: Path, header: dict[str, object], data: bytes, *, header_bytes: int | None = None) -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if header_bytes is None else header_bytes) + encoded + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_decides_between_shards(tmp_path: Path) -> None:
    """SAF-02: a stale copy in another shard, and a stray file, change nothing."""
    save_file({"a": np.full(3, 1, np.float32), "b": np.full(3, 2, np.float32)}, tmp_path / "one.safetensors")
    save_file({"a": np.full(3, 9, np.float32), "c": np.full(3, 3, np.float32)}, tmp_path / "two.safetensors")
    save_file({"b": np.full(3, 9, np.float32)}, tmp_path / "stray.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    with SafetensorsFolder.open(tmp_path) as folder:
        assert {name: folder.weight(name)[0] for name in folder.names} == {"a": 1, "b": 2, "c": 3}


DAMAGED = {
    "cut short": ({"a": entry([256], 0, 1024)}, bytes(512), None),
    "header of 2**60 bytes": ({"a": entry([4], 0, 16)}, bytes(16), 2**60),
    "overlapping offsets": ({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24), None),
    "a gap": ({"a": entry([2], 0, 8), "b": entry([2], 16, 24)}, bytes(24), None),
    "a shape that the offsets contradict": ({"a": entry([8], 0, 16)}, bytes(16), None),
    "bytes behind the last tensor": ({"a": entry([4], 0, 16)}, bytes(32), None),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(name: str, tmp_path: Path) -> None:
    """SAF-03."""
    header, data, header_bytes = DAMAGED[name]
    raw_file(tmp_path / "model.safetensors", header, data, header_bytes=header_bytes)
    with pytest.raises(ModelError, match=r"model\.safetensors is no sound"):
        SafetensorsFolder.open(tmp_path)


def test_half_floats_are_widened_exactly(tmp_path: Path) -> None:
    values = np.array([1.5, -2.25, 3e-5, 65280.0], np.float32)
    bfloat = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = {"b": entry([4], 0, 8, "BF16"), "h": entry([2, 2], 8, 16, "F16"), "i": entry([1], 16, 24, "I64")}
    data = bfloat.tobytes() + values.astype(np.float16).tobytes() + bytes(8)
    raw_file(tmp_path / "model.safetensors", header, data)
    with SafetensorsFolder.open(tmp_path) as folder:
        np.testing.assert_array_equal(folder.weight("b").view(np.uint32), bfloat.astype(np.uint32) << 16)
        np.testing.assert_array_equal(folder.weight("h"), values.astype(np.float16).reshape(2, 2).astype(np.float32))
        with pytest.raises(ModelError, match="i is stored as I64"):
            folder.weight("i")


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", "sub/one.safetensors", "gone.safetensors"])
def test_the_index_cannot_point_elsewhere(place: str, tmp_path: Path) -> None:
    write_index(tmp_path, {"a": place})
    with pytest.raises(ModelError):
        SafetensorsFolder.open(tmp_path)


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"b": "one.safetensors"})
    with pytest.raises(ModelError, match="places tensor b"):
        SafetensorsFolder.open(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({name: np.zeros(1, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json"):
        SafetensorsFolder.open(tmp_path)
