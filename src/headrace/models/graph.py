"""Builds the paged graph of a llama-like model from its weights, with the names of protocol/graph.py.

Owns: the model's arithmetic. Runs in: launch, before serving. Must not know: file formats, where graphs are stored.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.op
import openvino.opset13 as ops
from numpy.typing import DTypeLike, NDArray

from headrace.models.architecture import ModelConfig
from headrace.models.rope import Rope
from headrace.models.weights import FloatArray, ModelWeights
from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError

Node = Any  # openvino.Node or one of its outputs; the package has no types
INT8_GROUP_SIZES = (
    128,
    96,
    64,
    32,
)  # of int8-group: multiples of 32, the least group in which the CPU plugin rounds activations
PRECISIONS = ("int8", "int8-group", "f16", "f32")
FINE_POSITIONS = 256  # positions in the finer of the two tables of angles
EXCLUDED_LOGIT = -1e30  # of padding ids: below every real logit, and exp() of it is 0


class _Steps:
    """The inputs that say which tokens of which rows a step computes, and where their KV blocks lie."""

    def __init__(self) -> None:
        self.input_ids = _parameter(names.INPUT_IDS, [-1], np.int64)
        self.position_ids = _parameter(names.POSITION_IDS, [-1], np.int64)
        self.past_lens = _parameter(names.PAST_LENS, [-1], np.int32)
        self.subsequence_begins = _parameter(names.SUBSEQUENCE_BEGINS, [-1], np.int32)
        self.block_indices = _parameter(names.BLOCK_INDICES, [-1], np.int32)
        self.block_indices_begins = _parameter(names.BLOCK_INDICES_BEGINS, [-1], np.int32)
        self.max_context_len = _parameter(names.MAX_CONTEXT_LEN, [], np.int32)
        self.sampled_tokens_indices = _parameter(names.SAMPLED_TOKENS_INDICES, [-1], np.int32)
        self.parameters: list[Node] = list(vars(self).values())


def build_graph(
    config: ModelConfig,
    weights: ModelWeights,
    *,
    vocab_size: int,
    precision: str,
    progress: Callable[[float], None] = lambda share: None,
) -> ov.Model:
    """The whole model. `vocab_size`: the true one; rows beyond it never have the best logit. `progress`: share done, 0..1.

    Raises ModelError when a tensor is missing, misshapen or unknown.
    """
    if precision not in PRECISIONS:
        raise ModelError(f"precision {precision!r} is not offered; choose one of {', '.join(PRECISIONS)}.")
    steps = _Steps()
    embedding, head = weights.embedding(), weights.head()
    table = _Matrix(embedding, precision)
    output_matrix = table if head is None else _Matrix(head, precision)
    num_rows = len(embedding)
    del embedding, head
    x = ops.unsqueeze(table.rows(steps.input_ids), _const([1], np.int32))  # [T, 1, hidden]
    x = _scaled(x, config.embedding_scale)
    angles = _angles(config.rope, steps.position_ids, config.max_model_len)
    for index in range(config.num_layers):
        x = _layer(config, weights, index, steps, angles, x, precision)
        progress((index + 1) / config.num_layers)
    x = ops.gather(x, steps.sampled_tokens_indices, _const(0, np.int32))
    x = _scaled(_rms_norm(x, weights.final_norm(), config.rms_epsilon), 1 / config.logits_divisor)
    logits = output_matrix.times(x)
    weights.check_all_used()
    return ov.Model(
        [output.output(index) for output, index in finish(logits, num_rows, vocab_size)], steps.parameters, "headrace"
    )


def finish(logits: Node, num_rows: int, vocab_size: int) -> list[tuple[Node, int]]:
    """The outputs of protocol/graph.py from logits f32 [R, 1, num_rows], as (node, output index) pairs.

    Padding ids (vocab_size <= id < num_rows) are pushed out of reach, so the log normaliser counts the true vocabulary only.
    """
    if num_rows > vocab_size:
        excluded = np.where(np.arange(num_rows) < vocab_size, 0.0, EXCLUDED_LOGIT)
        logits = ops.add(logits, _const(excluded.reshape(1, 1, -1)))
    best = ops.topk(logits, _const(min(names.TOP_K, vocab_size), np.int32), 2, "max", "value", index_element_type="i32")
    # Relative to the largest logit, so that exp() cannot overflow.
    largest = ops.gather(best.output(0), _const([0], np.int32), _const(2, np.int32))
    total = ops.reduce_sum(ops.exp(ops.subtract(logits, largest)), _const([2], np.int32), True)
    normalizer = ops.add(ops.log(total), largest)
    outputs = [(logits, 0), (best, 0), (best, 1), (normalizer, 0)]
    for (node, index), name in zip(
        outputs, (names.LOGITS, names.TOP_VALUES, names.TOP_INDICES, names.LOG_NORMALIZER), strict=True
    ):
        node.output(index).set_names({name})
    return outputs


def _layer(
    config: ModelConfig, weights: ModelWeights, index: int, steps: _Steps, angles: tuple[Node, Node], x: Node, precision: str
) -> Node:
    """One transformer layer: [T, 1, hidden] -> [T, 1, hidden]."""
    hidden, size = config.hidden_size, config.head_size
    epsilon = config.rms_epsilon

    def linear(values: Node, stem: str, num_out: int, num_in: int) -> Node:
        matrix = _Matrix(weights.layer(index, f"{stem}.weight", shape=(num_out, num_in)), precision)
        bias = weights.layer_if_any(index, f"{stem}.bias", shape=(num_out,))
        product = matrix.times(values)
        return product if bias is None else ops.add(product, _const(bias.reshape(1, 1, -1)))

    def rotated(values: Node, stem: str, num_heads: int) -> Node:
        values = ops.reshape(linear(values, stem, num_heads * size, hidden), _const([-1, num_heads, size], np.int32), False)
        norm = weights.layer_if_any(index, f"{stem}_norm.weight", shape=(size,))
        if norm is not None:
            values = _rms_norm(values, norm, epsilon)
        return ops.reshape(_rotate(values, angles), _const([-1, num_heads * size], np.int32), False)

    h = _rms_norm(x, weights.layer(index, "attn_norm.weight", shape=(hidden,)), epsilon)
    query, key = rotated(h, "attn_q", config.num_heads), rotated(h, "attn_k", config.num_kv_heads)
    value = linear(h, "attn_v", config.num_kv_heads * size, hidden)
    value = ops.reshape(value, _const([-1, config.num_kv_heads * size], np.int32), False)
    attended = _paged_attention(config, index, steps, (query, key, value))
    attended = ops.reshape(attended, _const([-1, 1, config.num_heads * size], np.int32), False)
    x = ops.add(x, _scaled(linear(attended, "attn_output", hidden, config.num_heads * size), config.residual_scale))

    h = _rms_norm(x, weights.layer(index, "ffn_norm.weight", shape=(hidden,)), epsilon)
    inner = weights.ffn_size(index)
    gated = ops.multiply(ops.swish(linear(h, "ffn_gate", inner, hidden)), linear(h, "ffn_up", inner, hidden))
    return ops.add(x, _scaled(linear(gated, "ffn_down", hidden, inner), config.residual_scale))


class _Matrix:
    """A weight [out, in], held once at the chosen precision, used as a table of rows or as a factor."""

    def __init__(self, weight: FloatArray, precision: str) -> None:
        self._shape = weight.shape
        self._scale: Node | None = None
        if precision.startswith("int8"):
            quantized, scale = quantize_int8(weight, INT8_GROUP_SIZES if precision == "int8-group" else ())
            self._stored = ops.constant(quantized)
            self._scale = ops.constant(scale)
        else:
            self._stored = ops.constant(weight.astype(np.float16 if precision == "f16" else np.float32))
        self._widen = precision != "f32"

    def rows(self, indices: Node) -> Node:
        """[N] indices -> f32 [N, in]. The rows are widened after they are picked: the whole table never is."""
        picked = self._float(ops.gather(self._stored, indices, _const(0, np.int32)))
        if self._scale is None:
            return picked
        scaled = ops.multiply(picked, ops.gather(self._scale, indices, _const(0, np.int32)))
        return ops.reshape(scaled, _const([-1, self._shape[1]], np.int32), False)

    def times(self, values: Node) -> Node:
        """f32 [..., in] -> f32 [..., out]. The plugin multiplies with the stored integers; it widens no whole matrix."""
        factor = self._float(self._stored)
        if self._scale is not None:
            factor = ops.reshape(ops.multiply(factor, self._scale), _const(self._shape, np.int64), False)
        return ops.matmul(values, factor, False, True)

    def _float(self, node: Node) -> Node:
        return ops.convert(node, "f32") if self._widen else node


def quantize_int8(weight: FloatArray, group_sizes: Sequence[int] = ()) -> tuple[NDArray[np.int8], FloatArray]:
    """[out, in] -> int8 [out, groups, size] and f32 scales [out, groups, 1], symmetric.

    By default one group is a whole row (an output channel). Groups keep more of the weights and cost speed (docs/lab.md);
    their size is the first of `group_sizes` that divides the row, and a row that none divides is one group.
    """
    num_out, num_in = weight.shape
    size = next((size for size in group_sizes if num_in % size == 0), num_in)
    grouped = weight.reshape(num_out, num_in // size, size)
    largest = np.maximum(grouped.max(axis=2, keepdims=True), -grouped.min(axis=2, keepdims=True))
    scale = np.maximum(largest, np.float32(1e-8)) / np.float32(127)
    scaled = grouped / scale
    return np.rint(scaled, out=scaled).astype(np.int8), scale


def _paged_attention(config: ModelConfig, index: int, steps: _Steps, query_key_value: Sequence[Node]) -> Node:
    """[T, heads * size] from query [T, heads * size], key and value [T, KV heads * size], and the blocks of layer `index`."""
    caches = [
        _parameter(f"{prefix}{index}", ov.PartialShape([-1] * 4), ov.Type.dynamic)
        for prefix in (names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX)
    ]
    steps.parameters += caches
    zero, none = _const(0, np.int32), _empty(np.int32)
    inputs = [*query_key_value, *caches]
    inputs += [steps.past_lens, steps.subsequence_begins, steps.block_indices, steps.block_indices_begins]
    inputs += [_const(config.attention_scale), zero, _empty(np.float32), steps.max_context_len]  # sliding window, alibi slopes
    inputs += [none, none, none, _empty(np.float32)]  # score window; cache rotation: blocks, deltas, table
    inputs += [_empty(np.float32), zero, zero, _empty(np.float32, 4)]  # sparse attention: threshold, block, stride; sinks
    inputs += [zero, none, none, none, none, _empty(np.uint8), none]  # adaptive eviction and token types
    attention = openvino.op._PagedAttentionExtension([node.output(0) for node in inputs])
    info = attention.get_rt_info()  # the CPU plugin shapes the KV storage from these
    info["num_k_heads"] = info["num_v_heads"] = config.num_kv_heads
    info["k_head_size"] = info["v_head_size"] = config.head_size
    return attention.output(0)


def _angles(rope: Rope, positions: Node, max_model_len: int) -> tuple[Node, Node]:
    """Cosine and sine, each [T, 1, size], of every position's angles: looked up, not computed from the position.

    A device that computes in bf16 would round a position to 8 bits before the angle is taken (perplexity rises by 40 %).
    A whole table would be large for long contexts, so there are two, of every 256th position and of those between, joined
    by the angle sum identities.
    """
    speeds = np.concatenate([rope.inverse_frequencies()] * 2).astype(np.float64)
    coarse = np.arange(0, max_model_len, FINE_POSITIONS)[:, None] * speeds
    fine = np.arange(FINE_POSITIONS)[:, None] * speeds
    step = _const(FINE_POSITIONS, np.int64)
    high = ops.divide(positions, step)
    low = ops.subtract(positions, ops.multiply(high, step))

    def looked_up(table: NDArray[np.float64], rows: Node) -> Node:
        return ops.unsqueeze(ops.gather(_const(table), rows, _const(0, np.int32)), _const([1], np.int32))

    cos_high, sin_high = (looked_up(rope.magnitude() * part(coarse), high) for part in (np.cos, np.sin))
    cos_low, sin_low = (looked_up(part(fine), low) for part in (np.cos, np.sin))
    cosine = ops.subtract(ops.multiply(cos_high, cos_low), ops.multiply(sin_high, sin_low))
    sine = ops.add(ops.multiply(sin_high, cos_low), ops.multiply(cos_high, sin_low))
    return cosine, sine


def _rotate(x: Node, angles: tuple[Node, Node]) -> Node:
    """[T, heads, size]: component i turns with component i + size / 2."""
    cosine, sine = angles
    half = ops.split(x, _const(-1, np.int32), 2)
    turned = ops.concat([ops.multiply(half.output(1), _const(-1.0)), half.output(0)], -1)
    return ops.add(ops.multiply(x, cosine), ops.multiply(turned, sine))


def _rms_norm(x: Node, weight: FloatArray, epsilon: float) -> Node:
    """arXiv 1910.07467, over the last axis of a rank-3 tensor."""
    mean = ops.reduce_mean(ops.power(x, _const(2.0)), _const([-1], np.int32), True)
    scaled = ops.multiply(x, ops.divide(_const(1.0), ops.sqrt(ops.add(mean, _const(epsilon)))))
    return ops.multiply(_const(weight.reshape(1, 1, -1)), scaled)


def _scaled(x: Node, factor: float) -> Node:
    return x if factor == 1.0 else ops.multiply(x, _const(factor))


def _parameter(name: str, shape: Any, dtype: Any) -> Node:
    node = ops.parameter(shape, dtype)
    node.output(0).set_names({name})
    node.set_friendly_name(name)
    return node


def _const(value: Any, dtype: DTypeLike = np.float32) -> Node:
    return ops.constant(np.array(value, dtype))


def _empty(dtype: DTypeLike, rank: int = 1) -> Node:
    return ops.constant(np.zeros([0] * rank, dtype))
