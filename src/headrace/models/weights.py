"""A model's tensors under one set of names (GGUF's), checked for shape, in the order of components that the graph rotates.

Owns: the map of names between formats. Runs in: launch, before serving. Must not know: file formats, OpenVINO.
"""

from collections.abc import Collection
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.models.architecture import ModelConfig
from headrace.protocol.errors import ModelError

FloatArray = NDArray[np.float32]

HUGGINGFACE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTATED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
# Not read because the configuration says the same: angle speeds stored beside it.
DERIVED_SUFFIXES = ("rope_freqs.weight", "rotary_emb.inv_freq")


class TensorStore(Protocol):
    """Tensors by the file's own names."""

    @property
    def names(self) -> Collection[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape, outermost first. Raises ModelError when there is none of that name."""
        ...

    def weight(self, name: str) -> FloatArray:
        """The tensor as float32. Raises ModelError when it is missing or cannot be read."""
        ...


class ModelWeights:
    """Read tensors one at a time; every one must be asked for before check_all_used(), so that none is silently left out."""

    def __init__(self, store: TensorStore, config: ModelConfig, layout: Literal["gguf", "huggingface"]) -> None:
        self._store = store
        self._config = config
        self._layout = layout
        self._used: set[str] = set()

    def embedding(self) -> FloatArray:
        """[rows, hidden]; rows may exceed the true vocabulary."""
        return self._read("token_embd.weight", (self.num_embedding_rows, self._config.hidden_size))

    @property
    def num_embedding_rows(self) -> int:
        """Rows of the embedding and of the logits."""
        return self._store.shape(self._file_name("token_embd.weight"))[0]

    def head(self) -> FloatArray | None:
        """[rows, hidden] of an untied head; None when the embedding serves as head too."""
        name = self._file_name("output.weight")
        if self._config.tied or (self._config.tied is None and name not in self._store.names):
            self._used.add(name)
            return None
        return self._read("output.weight", (self.num_embedding_rows, self._config.hidden_size))

    def final_norm(self) -> FloatArray:
        """[hidden]."""
        return self._read("output_norm.weight", (self._config.hidden_size,))

    def layer(self, index: int, name: str, *, shape: tuple[int, ...]) -> FloatArray:
        """A tensor of layer `index`. Raises ModelError when it is missing or of another shape."""
        return self._read(f"blk.{index}.{name}", shape)

    def layer_if_any(self, index: int, name: str, *, shape: tuple[int, ...]) -> FloatArray | None:
        """As layer(), or None when the model has no such tensor and its architecture does not need one."""
        full = f"blk.{index}.{name}"
        if self._file_name(full) not in self._store.names and name not in self._config.architecture.needs:
            return None
        return self._read(full, shape)

    def ffn_size(self, index: int) -> int:
        """Inner width of the layer's gated network."""
        return self._store.shape(self._file_name(f"blk.{index}.ffn_gate.weight"))[0]

    def check_all_used(self) -> None:
        """Raise ModelError when the file holds tensors that nothing asked for: the model computes something else."""
        unused = sorted(name for name in self._store.names if name not in self._used and not name.endswith(DERIVED_SUFFIXES))
        if unused:
            raise ModelError(
                f"the model has {len(unused)} tensors that architecture {self._config.architecture.name} does not know, "
                f"such as {unused[0]}: it cannot be run rightly."
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        file_name = self._file_name(name)
        found = self._store.shape(file_name)
        if found != shape:
            raise ModelError(f"tensor {file_name} has shape {list(found)}; the model's configuration asks for {list(shape)}.")
        self._used.add(file_name)
        array = self._store.weight(file_name)
        if self._layout == "gguf" and self._config.architecture.gguf_pairs_adjacent and name.endswith(ROTATED):
            return _halves(array, self._config.head_size)
        return array

    def _file_name(self, name: str) -> str:
        if self._layout == "gguf":
            return name
        if not name.startswith("blk."):
            return HUGGINGFACE_NAMES[name]
        _, index, inner = name.split(".", 2)
        stem, _, kind = inner.rpartition(".")
        renamed = HUGGINGFACE_NAMES.get(inner) or f"{HUGGINGFACE_NAMES[stem]}.{kind}"
        return f"model.layers.{index}.{renamed}"


def _halves(array: FloatArray, head_size: int) -> FloatArray:
    """Reorder rows so that a head's rotary pairs (0, 1), (2, 3) ... become (0, h), (1, h + 1) ..., h half the head's size."""
    pairs = array.reshape(-1, head_size // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
