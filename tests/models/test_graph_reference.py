"""The compiled paged graph computes what a plain numpy forward pass computes, for every architecture and rotary scaling."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.models.prepare import load_graph, load_manifest, prepare, resolve_source
from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError
from tests.models import reference_model, tiny_models
from tests.models.paged_runner import PagedRunner
from tests.models.tiny_models import Tiny, make

pytestmark = pytest.mark.slow  # each compiles a graph

IDS = [int(token) for token in np.random.default_rng(5).integers(3, 300, 45)]  # two blocks
DIVISORS = np.array([1, 1, 1.5, 2, 4, 4, 8, 8], np.float32)


def yarn_speeds(model: Tiny, factor: float, original: int) -> np.ndarray:
    """Written from the paper's text (arXiv 2309.00071, section 3.2), beta 32 and 1, with whole pairs as limits."""
    plain = reference_model.plain_speeds(model)

    def pair(turns: float) -> float:
        return model.head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.theta))

    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), model.head_size - 1)
    kept = [1 - min(max((index - low) / (high - low), 0), 1) for index in range(len(plain))]
    return np.array([speed * keep + speed / factor * (1 - keep) for speed, keep in zip(plain, kept, strict=True)])


def llama3_speeds(model: Tiny, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """By wavelength, case by case."""
    result = []
    for speed in reference_model.plain_speeds(model):
        wavelength = 2 * math.pi / speed
        if wavelength < original / high:
            result.append(speed)
        elif wavelength > original / low:
            result.append(speed / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * speed / factor + smooth * speed)
    return np.array(result)


def scaled_models() -> dict[str, tuple[Tiny, np.ndarray, float]]:
    """GGU-11: models with rotary scaling in their GGUF metadata, with the angle speeds and the magnitude that are right."""
    llama = make("llama", adjacent=True)
    speeds = reference_model.plain_speeds(llama)
    linear = replace(llama, gguf_keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    yarn_keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    explicit = replace(llama, tensors={**llama.tensors, "rope_freqs.weight": DIVISORS})
    return {
        "linear": (linear, speeds / 4, 1.0),
        "yarn": (replace(llama, gguf_keys=yarn_keys), yarn_speeds(llama, 4.0, 32), 0.1 * math.log(4) + 1),
        "rope_freqs (GGU-01)": (explicit, speeds / DIVISORS, 1.0),
    }


GRANITE = {"attention_scale": 0.3, "embedding_scale": 2.5, "residual_scale": 0.4, "logits_divisor": 3.0}
GGUF_GRANITE = {"attention.scale": 0.3, "embedding_scale": 2.5, "residual_scale": 0.4, "logit_scale": 3.0}
PLAIN = {
    "llama, tied (GGU-02)": make("llama", adjacent=True),
    "llama, own head, padded rows (GGU-10)": make("llama", adjacent=True, tied=False, rows=320),
    "qwen2, biases": make("qwen2", theta=1e6),
    "qwen3, norms, wide heads": make("qwen3", head_size=32, tied=False, epsilon=1e-6),
    "granite": make("granite", adjacent=True, gguf_keys=GGUF_GRANITE, **GRANITE),
}
HUGGINGFACE = {
    "llama": make("llama"),
    "mistral": make("mistral", tied=False, hf_keys={"sliding_window": None}),
    "qwen2": make("qwen2", hf_keys={"use_sliding_window": False, "sliding_window": 16}),
    "qwen3": make("qwen3", head_size=32),
    "granite": make(
        "granite",
        hf_keys={"attention_multiplier": 0.3, "embedding_multiplier": 2.5, "residual_multiplier": 0.4, "logits_scaling": 3.0},
        **GRANITE,
    ),
}


def prepared(source: Path, cache: Path, precision: str = "f32") -> Path:
    return prepare(resolve_source(str(source)), cache_dir=cache, precision=precision)


def run(folder: Path, **options: str) -> dict[str, np.ndarray]:
    return PagedRunner(load_graph(folder), **options).step([(IDS, 0, [3, 1])])


@pytest.mark.parametrize("name", PLAIN)
def test_gguf_architectures_match_the_reference(name: str, tmp_path: Path) -> None:
    model = PLAIN[name]
    folder = prepared(tiny_models.write_gguf(tmp_path / "m.gguf", model), tmp_path)
    found, expected = run(folder)[names.LOGITS], reference_model.logits(model, IDS)
    np.testing.assert_allclose(found[:, :300], expected[:, :300], atol=1e-3)
    assert load_manifest(folder).vocab_size == 300


@pytest.mark.parametrize("name", scaled_models())
def test_gguf_rope_scaling_is_applied(name: str, tmp_path: Path) -> None:
    """GGU-01, GGU-11: the logits are those of the scaled reference, and not those of the plain one."""
    model, speeds, magnitude = scaled_models()[name]
    folder = prepared(tiny_models.write_gguf(tmp_path / "m.gguf", model), tmp_path)
    found = run(folder)[names.LOGITS]
    np.testing.assert_allclose(found, reference_model.logits(model, IDS, speeds, magnitude), atol=1e-3)
    assert np.abs(found - reference_model.logits(model, IDS)).max() > 0.1


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_huggingface_architectures_match_the_reference(name: str, tmp_path: Path) -> None:
    model = HUGGINGFACE[name]
    folder = prepared(tiny_models.write_huggingface(tmp_path / "m", model), tmp_path)
    np.testing.assert_allclose(run(folder)[names.LOGITS], reference_model.logits(model, IDS), atol=1e-3)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_huggingface_llama3_scaling(key: str, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500.0,
    }
    model = make("llama", theta=500.0, hf_keys={key: scaling})
    folder = prepared(tiny_models.write_huggingface(tmp_path / "m", model), tmp_path)
    found = run(folder)[names.LOGITS]
    np.testing.assert_allclose(found, reference_model.logits(model, IDS, llama3_speeds(model, 8, 1, 4, 64)), atol=1e-3)
    assert np.abs(found - reference_model.logits(model, IDS)).max() > 0.1


def test_huggingface_yarn_scaling_and_context(tmp_path: Path) -> None:
    """The stated context is the original one where no other is named, and factor times that is reached."""
    model = make("qwen2", hf_keys={"rope_scaling": {"type": "yarn", "factor": 4.0}})
    folder = prepared(tiny_models.write_huggingface(tmp_path / "m", model), tmp_path)
    expected = reference_model.logits(model, IDS, yarn_speeds(model, 4, tiny_models.CONTEXT), 0.1 * math.log(4) + 1)
    np.testing.assert_allclose(run(folder)[names.LOGITS], expected, atol=1e-3)
    assert load_manifest(folder).max_model_len == 4 * tiny_models.CONTEXT


@pytest.mark.parametrize(("precision", "most"), [("f32", 1e-4), ("f16", 0.02), ("int8-group", 0.5), ("int8", 0.5)])
def test_outputs_agree_with_one_another(precision: str, most: float, tmp_path: Path) -> None:
    """Best candidates, their order and the normaliser are those of the logits; padding rows are never among them (GGU-10)."""
    model = PLAIN["llama, own head, padded rows (GGU-10)"]
    outputs = run(prepared(tiny_models.write_gguf(tmp_path / "m.gguf", model), tmp_path, precision))
    logits = outputs[names.LOGITS].astype(np.float64)
    expected = reference_model.logits(model, IDS)[:, :300]
    assert np.abs(logits[:, :300] - expected).max() / expected.std() < most
    assert logits[:, 300:].max() < -1e29
    np.testing.assert_array_equal(outputs[names.TOP_VALUES], -np.sort(-outputs[names.LOGITS], axis=1)[:, : names.TOP_K])
    picked = np.take_along_axis(outputs[names.LOGITS], outputs[names.TOP_INDICES], axis=1)
    np.testing.assert_array_equal(picked, outputs[names.TOP_VALUES])
    normalizer = np.log(np.exp(logits[:, :300]).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(outputs[names.LOG_NORMALIZER], normalizer, rtol=1e-5)


def test_chunks_other_rows_and_shared_blocks_change_nothing(tmp_path: Path) -> None:
    model = PLAIN["llama, tied (GGU-02)"]
    runner = PagedRunner(load_graph(prepared(tiny_models.write_gguf(tmp_path / "m.gguf", model), tmp_path)))
    expected = reference_model.logits(model, IDS)
    pieces = []
    for start in range(0, len(IDS), 7):
        other = ([9, 8, 7], 0, [9])
        part = IDS[start : start + 7]
        logits = runner.step([other, (part, start, [4, 2][: (start + len(part) - 1) // 32 + 1])])[names.LOGITS]
        pieces.append(logits[3:])
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-3)
    reused = runner.step([(IDS[32:], 32, [4, 5])], wanted=[12])  # the first block as it was left
    np.testing.assert_allclose(reused[names.LOGITS], expected[-1:], atol=1e-3)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_quantized_gguf_is_dequantized_exactly(quantization: str, tmp_path: Path) -> None:
    from headrace.models.gguf_file import GgufFile

    model = make("llama", adjacent=True)
    path = tiny_models.write_gguf(tmp_path / "m.gguf", model, quantization=quantization)
    with GgufFile.open(path) as file:
        stored = {name: file.weight(name) for name in model.tensors}
    np.testing.assert_allclose(stored["blk.0.ffn_up.weight"], model.tensors["blk.0.ffn_up.weight"], atol=0.15)
    found = run(prepared(path, tmp_path))[names.LOGITS]
    np.testing.assert_allclose(found, reference_model.logits(replace(model, tensors=stored), IDS), atol=1e-3)


def test_huggingface_half_floats(tmp_path: Path) -> None:
    model = make("llama")
    halves = replace(model, tensors={name: tensor.astype(np.float16) for name, tensor in model.tensors.items()})
    folder = prepared(tiny_models.write_huggingface(tmp_path / "m", model, dtype="float16"), tmp_path)
    np.testing.assert_allclose(run(folder)[names.LOGITS], reference_model.logits(halves, IDS), atol=1e-3)


def test_a_tensor_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    """A model with extra weights computes something else than the architecture says."""
    model = make("llama", adjacent=True)
    extra = replace(model, tensors={**model.tensors, "blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"attn_sinks"):
        prepared(tiny_models.write_gguf(tmp_path / "m.gguf", extra), tmp_path)


def test_a_missing_bias_is_refused_by_name(tmp_path: Path) -> None:
    model = make("qwen2")
    kept = {name: tensor for name, tensor in model.tensors.items() if name != "blk.1.attn_k.bias"}
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.bias"):
        prepared(tiny_models.write_gguf(tmp_path / "m.gguf", replace(model, tensors=kept)), tmp_path)
