"""Tiny random models in GGUF and Hugging Face form, with the plain numbers that a reference needs to compute the same."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from headrace.models.gguf_tokenizer import build_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 64, 2, 4, 2, 96, 256
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
HF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Tiny:
    """One tiny model. `tensors` are named as in GGUF; `adjacent`: rotary pairs stand side by side, as GGUF llama has them."""

    arch: str
    tensors: dict[str, np.ndarray]
    num_tokens: int
    head_size: int = 16
    adjacent: bool = False
    theta: float = 10000.0
    epsilon: float = 1e-5
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_size)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    gguf_keys: dict[str, Any] = field(default_factory=dict)
    hf_keys: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_size**-0.5


def make(
    arch: str,
    *,
    seed: int = 0,
    head_size: int = 16,
    tied: bool = True,
    rows: int = 300,
    num_tokens: int = 300,
    **fields: Any,
) -> Tiny:
    """Random weights, large enough that a wrong formula shows in the logits."""
    rng = np.random.default_rng(seed)

    def matrix(num_out: int, num_in: int) -> np.ndarray:
        return (rng.standard_normal((num_out, num_in)) * 1.5 / np.sqrt(num_in)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(rows, HIDDEN) * 4, "output_norm.weight": norm(HIDDEN)}
    if not tied:
        tensors["output.weight"] = matrix(rows, HIDDEN) * 4
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        for stem, shape in {
            "attn_q": (HEADS * head_size, HIDDEN),
            "attn_k": (KV_HEADS * head_size, HIDDEN),
            "attn_v": (KV_HEADS * head_size, HIDDEN),
            "attn_output": (HIDDEN, HEADS * head_size),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            tensors[f"{name}{stem}.weight"] = matrix(*shape)
            if arch == "qwen2" and stem in ("attn_q", "attn_k", "attn_v"):
                tensors[f"{name}{stem}.bias"] = rng.standard_normal(shape[0]).astype(np.float32)
        tensors[name + "attn_norm.weight"], tensors[name + "ffn_norm.weight"] = norm(HIDDEN), norm(HIDDEN)
        if arch == "qwen3":
            tensors[name + "attn_q_norm.weight"], tensors[name + "attn_k_norm.weight"] = norm(head_size), norm(head_size)
    return replace(Tiny(arch, tensors, num_tokens, head_size), **fields)


def byte_tokens() -> list[str]:
    """The 256 byte tokens of byte-level BPE, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def tokenizer_metadata(num_tokens: int) -> dict[str, Any]:
    """A byte-level vocabulary of `num_tokens`, filled up with unused words."""
    tokens = [*SPECIALS, *byte_tokens(), "wo"]
    tokens += [f"word{index}" for index in range(num_tokens - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (num_tokens - len(SPECIALS)),
        "tokenizer.ggml.merges": ["w o"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def write_gguf(path: Path, model: Tiny, *, quantization: str = "F32") -> Path:
    """The model as a GGUF file; matrices stored in the quantization named."""
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_layer_norm_rms_eps(model.epsilon)
    writer.add_rope_freq_base(model.theta)
    for key, value in model.gguf_keys.items():
        full = key if key.startswith(("general.", "split.")) else f"{model.arch}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_float32(full, value)
    for key, value in tokenizer_metadata(model.num_tokens).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in model.tensors.items():
        if tensor.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def huggingface_tensors(model: Tiny) -> dict[str, np.ndarray]:
    """The tensors under their Hugging Face names."""
    renamed = {}
    for name, tensor in model.tensors.items():
        if name in HF_TOP:
            renamed[HF_TOP[name]] = tensor
        else:
            _, layer, inner = name.split(".", 2)
            renamed[f"model.layers.{layer}.{HF_LAYER[inner]}"] = tensor
    return renamed


def write_huggingface(folder: Path, model: Tiny, *, dtype: str = "float32") -> Path:
    """The model as a Hugging Face folder with one safetensors file (float32 or float16), tokenizer and configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(tensor.astype(dtype)) for name, tensor in huggingface_tensors(model).items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": model.arch,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": model.head_size,
        "rms_norm_eps": model.epsilon,
        "rope_theta": model.theta,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **model.hf_keys,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(tokenizer_metadata(model.num_tokens))
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
