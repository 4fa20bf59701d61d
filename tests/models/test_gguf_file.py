"""GGUF files that lie about themselves are refused before anything large is allocated; sound ones are read in every variant."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.models.architecture import config_from_gguf
from headrace.models.gguf_file import GgufFile
from headrace.protocol.errors import ModelError
from tests.models.tiny_models import make, write_gguf

U8, U32, F32, STRING, ARRAY, U64, I64 = 0, 4, 6, 8, 9, 10, 11


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, dimensions: list[int], offset: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def gguf(
    tensors: list[bytes] = [],  # noqa: B006
    pairs: list[bytes] = [],  # noqa: B006
    *,
    data: bytes = b"",
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


FLOATS = bytes(4 * 8)
DAMAGED = {
    "another format": gguf(magic=b"PK\3\4"),
    "version of a big-endian file": gguf(version=3 << 24),
    "dimension of zero": gguf([tensor("a", [4, 0])], data=FLOATS),
    "dimension of 2**42 + 1": gguf([tensor("a", [2**42 + 1])], data=FLOATS),
    "product that wraps 64 bits": gguf([tensor("a", [2**31, 2**31, 2**31])], data=FLOATS),
    "no dimensions": gguf([tensor("a", [])], data=FLOATS),
    "five dimensions": gguf([tensor("a", [1] * 5)], data=FLOATS),
    "offset beyond the end": gguf([tensor("a", [8], offset=1 << 40)], data=FLOATS),
    "data cut short": gguf([tensor("a", [8])], data=FLOATS[:-1]),
    "offset that is not aligned": gguf([tensor("a", [4], offset=4)], data=FLOATS),
    "tensors that overlap": gguf([tensor("a", [16]), tensor("b", [8], offset=32)], data=FLOATS * 4),
    "one tensor twice": gguf([tensor("a", [8]), tensor("a", [8], offset=32)], data=FLOATS * 2),
    "row that is no whole number of blocks": gguf([tensor("a", [8], kind=2)], data=FLOATS),
    "unknown quantization": gguf([tensor("a", [8], kind=999)], data=FLOATS),
    "name of 2**63 bytes": gguf([struct.pack("<Q", 2**63) + b"a"]),
    "string of 2**63 bytes": gguf([], [text("k") + struct.pack("<IQ", STRING, 2**63)]),
    "2**40 pairs": gguf(num_pairs=2**40),
    "2**40 tensors": gguf(num_tensors=2**40),
    "array of 2**60 numbers": gguf([], [text("k") + struct.pack("<IIQ", ARRAY, U8, 2**60)]),
    "array of 2**40 strings": gguf([], [text("k") + struct.pack("<IIQ", ARRAY, STRING, 2**40)]),
    "arrays nested without end": gguf([], [text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 9]),
    "unknown value type": gguf([], [text("k") + struct.pack("<IQ", 77, 0)]),
    "one key twice": gguf([], [text("k") + struct.pack("<II", U32, 1)] * 2),
    "alignment of zero": gguf([], [text("general.alignment") + struct.pack("<II", U32, 0)]),
    "alignment that is a string": gguf([], [text("general.alignment") + struct.pack("<I", STRING) + text("x")]),
    "nothing at all": b"",
    "header cut short": gguf([tensor("a", [8])])[:30],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused_with_flat_memory(name: str, tmp_path: Path) -> None:
    """GGU-07."""
    path = tmp_path / "m.gguf"
    path.write_bytes(DAMAGED[name])
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"m\.gguf"):
            GgufFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_any_damage_gives_a_model_error_or_a_sound_file(position: int, value: int, cut: int, tmp_path: Path) -> None:
    """GGU-07: whatever byte is wrong and wherever the file ends, opening and reading never fail in another way."""
    sound = bytearray(
        gguf(
            [tensor("a", [8]), tensor("b", [32, 2], offset=32, kind=2)],
            [
                text("general.architecture") + struct.pack("<I", STRING) + text("llama"),
                text("list") + struct.pack("<IIQ", ARRAY, STRING, 2) + text("x") + text("yy"),
                text("numbers") + struct.pack("<IIQ", ARRAY, U32, 3) + struct.pack("<3I", 1, 2, 3),
            ],
            data=FLOATS + bytes(36),
        )
    )
    if position < len(sound):
        sound[position] = value
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(sound)[: len(sound) - cut] or b"G")
    try:
        with GgufFile.open(path) as file:
            for name in file.names:
                file.weight(name)
    except ModelError:
        pass


def test_every_integer_width_and_value_type_is_read(tmp_path: Path) -> None:
    """GGU-08."""
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q", 6: "f", 12: "d", 7: "?"}
    pairs = [text(f"key{kind}") + struct.pack(f"<I{letter}", kind, 1) for kind, letter in formats.items()]
    pairs += [text(f"list{kind}") + struct.pack(f"<IIQ2{letter}", ARRAY, kind, 2, 0, 1) for kind, letter in formats.items()]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([], pairs))
    with GgufFile.open(path) as file:
        assert all(file.metadata[f"key{kind}"] == 1 for kind in formats)
        assert all(file.metadata[f"list{kind}"] == [0, 1] for kind in formats)
        assert all(type(file.metadata[f"list{kind}"][0]) in (int, float, bool) for kind in formats)


@pytest.mark.parametrize("key", ["llama.context_length", "llama.block_count", "llama.attention.layer_norm_rms_epsilon"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    """GGU-08."""
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", make("llama"))) as file:
        metadata = {name: value for name, value in file.metadata.items() if name != key}
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        config_from_gguf(metadata, "m.gguf")


def test_weights_are_the_ones_written_and_outlive_the_file(tmp_path: Path) -> None:
    model = make("llama")
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", model)) as file:
        weights = {name: file.weight(name) for name in file.names}
    assert weights.keys() == model.tensors.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, model.tensors[name])


def test_a_missing_tensor_and_one_that_cannot_be_dequantized_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([tensor("ints", [8], kind=26)], data=bytes(32)))  # I32
    with GgufFile.open(path) as file:
        with pytest.raises(ModelError, match="gone is missing"):
            file.weight("gone")
        with pytest.raises(ModelError, match=r"ints is stored as I32"):
            file.weight("ints")
