"""A tiny random llama as a paged graph: two layers, 64 wide, 320 tokens. Compiles in a fraction of a second."""

from collections.abc import Collection

import numpy as np
import openvino as ov

from headrace.models.architecture import ARCHITECTURES, ModelConfig
from headrace.models.graph import build_graph
from headrace.models.rope import Rope
from headrace.models.weights import FloatArray, ModelWeights
from headrace.protocol.manifest import Manifest

VOCAB_SIZE = 320
NUM_ROWS = 328  # of embedding and logits: eight are padding
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 128, 2, 1, 32, 2
NAN_TOKEN = 319  # computing it gives NaN logits, where the graph is asked for that

MANIFEST = Manifest(
    format_version=1,
    name="tiny",
    identity="tiny-identity",
    source="test",
    architecture="llama",
    precision="f32",
    vocab_size=VOCAB_SIZE,
    max_model_len=512,
    bos_token_id=None,
    eos_token_ids=[1],
    add_bos_token=False,
    versions={},
)
CONFIG = ModelConfig(
    architecture=next(row for row in ARCHITECTURES if row.name == "llama"),
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_size=HEAD_SIZE,
    rms_epsilon=1e-5,
    rope=Rope(theta=10_000.0, head_size=HEAD_SIZE),
    max_model_len=512,
    tied=False,
    attention_scale=HEAD_SIZE**-0.5,
)


class RandomTensors:
    """A TensorStore of seeded noise, scaled so that logits are well apart."""

    def __init__(self, with_nan: bool) -> None:
        random = np.random.default_rng(7)
        shapes = {"token_embd.weight": (NUM_ROWS, HIDDEN), "output.weight": (NUM_ROWS, HIDDEN)}
        for layer in range(LAYERS):
            shapes |= {
                f"blk.{layer}.attn_q.weight": (HEADS * HEAD_SIZE, HIDDEN),
                f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
                f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
                f"blk.{layer}.attn_output.weight": (HIDDEN, HEADS * HEAD_SIZE),
                f"blk.{layer}.ffn_gate.weight": (INNER, HIDDEN),
                f"blk.{layer}.ffn_up.weight": (INNER, HIDDEN),
                f"blk.{layer}.ffn_down.weight": (HIDDEN, INNER),
            }
        self._tensors = {
            name: random.standard_normal(shape, np.float32) * np.float32(1.5 / shape[1] ** 0.5)
            for name, shape in shapes.items()
        }
        for layer in range(LAYERS):
            self._tensors[f"blk.{layer}.attn_norm.weight"] = np.ones(HIDDEN, np.float32)
            self._tensors[f"blk.{layer}.ffn_norm.weight"] = np.ones(HIDDEN, np.float32)
        self._tensors["output_norm.weight"] = np.ones(HIDDEN, np.float32)
        if with_nan:
            self._tensors["token_embd.weight"][NAN_TOKEN] = np.nan

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def weight(self, name: str) -> FloatArray:
        return self._tensors[name]


def tiny_graph(with_nan: bool = False) -> ov.Model:
    weights = ModelWeights(RandomTensors(with_nan), CONFIG, "gguf")
    return build_graph(CONFIG, weights, vocab_size=VOCAB_SIZE, precision="f32")
