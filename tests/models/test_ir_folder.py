"""A ready, stateful OpenVINO IR becomes the same paged graph: built here as exporters write it, with no exporter needed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
from openvino.op import Parameter
from openvino.op.util import Variable, VariableInfo

from headrace.models.prepare import load_graph, load_manifest, prepare, resolve_source
from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError
from tests.models import reference_model
from tests.models.paged_runner import PagedRunner
from tests.models.tiny_models import HEADS, LAYERS, Tiny, make, write_huggingface

pytestmark = pytest.mark.slow
IDS = [int(token) for token in np.random.default_rng(6).integers(3, 300, 40)]


def const(value: Any, dtype: Any = np.float32) -> Any:
    return ops.constant(np.array(value, dtype))


def parameter(name: str, shape: list[int], dtype: Any = np.int64) -> Any:
    node: Parameter = ops.parameter(shape, dtype, name=name)
    node.output(0).set_names({name})
    return node


def norm(x: Any, weight: np.ndarray, epsilon: float) -> Any:
    mean = ops.reduce_mean(ops.power(x, const(2.0)), const([-1], np.int32), True)
    return ops.multiply(ops.divide(x, ops.sqrt(ops.add(mean, const(epsilon)))), const(weight))


def stateful_ir(model: Tiny) -> ov.Model:
    """Batch first, KV in variables, rows picked by beam_idx, scaled_dot_product_attention: the form of a stateful export."""
    ids, mask, positions = (parameter(name, [-1, -1]) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = parameter("beam_idx", [-1], np.int32)
    size, weights, sinks = model.head_size, model.tensors, []
    batch = ops.gather(ops.shape_of(ids, "i64"), const([0], np.int64), const(0, np.int64))
    x = ops.gather(const(weights["token_embd.weight"]), ids, const(0, np.int32))
    angle = ops.multiply(
        ops.unsqueeze(ops.convert(positions, "f32"), const([1, 3], np.int32)), const(reference_model.plain_speeds(model))
    )
    angle = ops.concat([angle, angle], 3)
    cosine, sine = ops.cos(angle), ops.sin(angle)

    def heads(h: Any, weight: np.ndarray, rotates: bool) -> Any:
        spread = np.repeat(weight.reshape(-1, size, weight.shape[1]), HEADS * size // len(weight), axis=0).reshape(
            -1, weight.shape[1]
        )
        y = ops.reshape(ops.matmul(h, const(spread), False, True), const([0, 0, HEADS, size], np.int64), True)
        y = ops.transpose(y, const([0, 2, 1, 3], np.int32))
        if not rotates:
            return y
        half = ops.split(y, const(3, np.int32), 2)
        turned = ops.concat([ops.multiply(half.output(1), const(-1.0)), half.output(0)], 3)
        return ops.add(ops.multiply(y, cosine), ops.multiply(turned, sine))

    def remembered(y: Any, name: str) -> Any:
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, HEADS, -1, size]), ov.Type.f32, name
        variable = Variable(info)
        start = ops.broadcast(const(0.0), ops.concat([batch, const([HEADS, 0, size], np.int64)], 0))
        past = ops.gather(ops.read_value(start, variable), beams, const(0, np.int32))
        whole = ops.concat([past, y], 2)
        sinks.append(ops.assign(whole, variable))
        return whole

    def causal(keys: Any) -> Any:
        """[batch, 1, new, all]: 0 where a key may be seen, -inf-like elsewhere."""
        total = ops.gather(ops.shape_of(mask, "i64"), const(1, np.int64), const(0, np.int64))
        places = ops.unsqueeze(ops.range(const(0, np.int64), total, const(1, np.int64), "i64"), const([0, 1, 2], np.int32))
        seen = ops.less_equal(places, ops.unsqueeze(positions, const([1, 3], np.int32)))
        seen = ops.logical_and(seen, ops.convert(ops.unsqueeze(mask, const([1, 2], np.int32)), "boolean"))
        return ops.select(seen, const(0.0), const(-65504.0))

    for layer in range(LAYERS):
        w = {name.split(".", 2)[2]: tensor for name, tensor in weights.items() if name.startswith(f"blk.{layer}.")}
        h = norm(x, w["attn_norm.weight"], model.epsilon)
        query = heads(h, w["attn_q.weight"], True)
        key = remembered(heads(h, w["attn_k.weight"], True), f"past_key_values.{layer}.key")
        value = remembered(heads(h, w["attn_v.weight"], False), f"past_key_values.{layer}.value")
        attended = ops.scaled_dot_product_attention(query, key, value, causal(key), const(model.scale), False)
        attended = ops.reshape(
            ops.transpose(attended, const([0, 2, 1, 3], np.int32)), const([0, 0, HEADS * size], np.int64), True
        )
        x = ops.add(x, ops.matmul(attended, const(w["attn_output.weight"]), False, True))
        h = norm(x, w["ffn_norm.weight"], model.epsilon)
        gated = ops.swish(ops.matmul(h, const(w["ffn_gate.weight"]), False, True))
        inner = ops.multiply(gated, ops.matmul(h, const(w["ffn_up.weight"]), False, True))
        x = ops.add(x, ops.matmul(inner, const(w["ffn_down.weight"]), False, True))
    x = norm(x, weights["output_norm.weight"], model.epsilon)
    logits = ops.matmul(x, const(weights.get("output.weight", weights["token_embd.weight"])), False, True)
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], sinks, [ids, mask, positions, beams], "tiny")


@pytest.fixture
def ir(tmp_path: Path) -> tuple[Path, Tiny]:
    model = make("llama", rows=304)  # four padding rows
    folder = write_huggingface(tmp_path / "tiny-ov", model)
    (folder / "model.safetensors").unlink()
    ov.save_model(stateful_ir(model), folder / "openvino_model.xml", compress_to_fp16=False)
    return folder, model


def test_a_stateful_ir_gives_the_reference_logits(ir: tuple[Path, Tiny], tmp_path: Path) -> None:
    """Whole, in chunks, for the tokens asked for; with the outputs and the padding rule of every prepared model (GGU-10)."""
    folder, model = ir
    prepared = prepare(resolve_source(str(folder)), cache_dir=tmp_path / "cache")
    manifest = load_manifest(prepared)
    assert (manifest.precision, manifest.vocab_size, manifest.name) == ("ir", 300, "tiny-ov")
    assert manifest.max_model_len == 256
    runner = PagedRunner(load_graph(prepared))
    expected = reference_model.logits(model, IDS)[:, :300]
    whole = runner.step([(IDS, 0, [2, 5])])
    np.testing.assert_allclose(whole[names.LOGITS][:, :300], expected, atol=1e-3)
    assert whole[names.LOGITS][:, 300:].max() < -1e29
    np.testing.assert_allclose(whole[names.LOG_NORMALIZER][:, 0], np.log(np.exp(expected).sum(axis=1)), rtol=1e-4)
    runner.step([(IDS[:33], 0, [1, 3])], wanted=[0])
    last = runner.step([([7, 8], 0, [9]), (IDS[33:], 33, [1, 3])], wanted=[8])
    np.testing.assert_allclose(last[names.LOGITS][:, :300], expected[-1:], atol=1e-3)
    assert last[names.TOP_INDICES].shape == (1, names.TOP_K)


def test_an_ir_that_generates_no_text_is_refused(ir: tuple[Path, Tiny], tmp_path: Path) -> None:
    folder, _ = ir
    x = parameter("pixels", [-1, 4], np.float32)
    ov.save_model(ov.Model([ops.relu(x)], [x], "other"), folder / "openvino_model.xml")
    with pytest.raises(ModelError, match="text-generation-with-past"):
        prepare(resolve_source(str(folder)), cache_dir=tmp_path / "cache")


def test_a_damaged_ir_is_refused(ir: tuple[Path, Tiny], tmp_path: Path) -> None:
    folder, _ = ir
    (folder / "openvino_model.xml").write_text("<net")
    with pytest.raises(ModelError, match="cannot be read"):
        prepare(resolve_source(str(folder)), cache_dir=tmp_path / "cache")


def test_an_ir_without_its_context_length_is_refused(ir: tuple[Path, Tiny], tmp_path: Path) -> None:
    folder, _ = ir
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="max_position_embeddings"):
        prepare(resolve_source(str(folder)), cache_dir=tmp_path / "cache")
