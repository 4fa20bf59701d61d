"""What cannot be computed rightly is refused by name; rotary scaling follows its formulas and moves the context's limit."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.architecture import config_from_gguf, config_from_huggingface
from headrace.models.gguf_file import GgufFile
from headrace.models.rope import Rope, RopeScaling
from headrace.protocol.errors import ModelError
from tests.models.tiny_models import make, write_gguf

HUGGINGFACE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


def gguf_metadata(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", make("llama"))) as file:
        return {**file.metadata, **{f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"attention__sliding_window": 128}, "sliding-window"),
        ({"attention__value_length": 32}, "32 for values"),
        ({"rope__dimension_count": 8}, "only 8 of 16"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__new_thing": 1.0}, "new_thing"),
        ({"attention__head_count_kv": 3}, "cannot share 3"),
        ({"attention__head_count_kv": [2, 1]}, "head_count_kv"),
        ({"residual_scale": 0.5}, "multipliers"),
        ({"context_length": 0}, "context_length"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "epsilon"),
    ],
)
def test_gguf_features_that_are_not_supported_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """GGU-11 among them: a scaling that is not known is never ignored."""
    with pytest.raises(ModelError, match=message):
        config_from_gguf(gguf_metadata(tmp_path, **keys), "m.gguf")


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3moe", "phi3", "bert"])
def test_other_architectures_are_refused_naming_those_supported(architecture: str) -> None:
    with pytest.raises(ModelError, match=rf"{architecture}.*llama.*qwen2.*qwen3"):
        config_from_gguf({"general.architecture": architecture}, "m.gguf")
    with pytest.raises(ModelError, match=rf"{architecture}.*llama.*qwen2.*qwen3"):
        config_from_huggingface({"model_type": architecture}, "config.json")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding-window"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
    ],
)
def test_huggingface_features_that_are_not_supported_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_huggingface({**HUGGINGFACE, **keys}, "config.json")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 256),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 256),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, 1024),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}, 256),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 256}, 1024),
    ],
)
def test_the_context_follows_the_scaling(keys: dict[str, Any], expected: int, tmp_path: Path) -> None:
    """GGU-11. Linear scaling without an original length is stated for the scaled context already."""
    assert config_from_gguf(gguf_metadata(tmp_path, **keys), "m.gguf").max_model_len == expected


def test_divisors_of_another_size_are_refused(tmp_path: Path) -> None:
    """GGU-01."""
    with pytest.raises(ModelError, match="rope_freqs"):
        config_from_gguf(gguf_metadata(tmp_path), "m.gguf", (1.0, 2.0))


@given(
    factor=st.floats(1.0, 64.0),
    original=st.integers(32, 1 << 17),
    theta=st.floats(1e3, 1e7),
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
)
def test_scaled_speeds_lie_between_the_plain_and_the_divided(factor: float, original: int, theta: float, kind: Any) -> None:
    plain = Rope(theta, 64).inverse_frequencies()
    scaled = Rope(theta, 64, RopeScaling(kind, factor, original)).inverse_frequencies()
    assert (scaled <= plain * 1.0001).all()
    assert (scaled >= plain / factor * 0.9999).all()
    if kind != "linear":  # the fastest pair is kept, the slowest divided, when the context tells them apart
        assert scaled[0] == pytest.approx(plain[0]) or original * plain[0] < 256 * math.pi
    assert np.isfinite(scaled).all()
