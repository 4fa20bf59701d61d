"""The architectures that can be built, one row each, and how their files' keys become a ModelConfig.

Owns: the table, and the refusal of everything that is not in it. Runs in: launch. Must not know: tensors' contents, graphs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.models.fields import Fields
from headrace.models.rope import Rope, RopeScaling
from headrace.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family of models that are llama in form: RMS norm, rotary positions, grouped attention, gated SiLU."""

    name: str  # in GGUF (general.architecture) and in the manifest
    huggingface_names: tuple[str, ...]  # model_type in config.json
    gguf_pairs_adjacent: bool  # the GGUF converter stores each rotary pair side by side, not in two halves
    needs: tuple[str, ...] = ()  # tensors of a layer that the family cannot do without, beside those of all
    has_multipliers: bool = False


ARCHITECTURES = (
    Architecture("llama", ("llama", "mistral"), gguf_pairs_adjacent=True),
    Architecture("qwen2", ("qwen2",), False, ("attn_q.bias", "attn_k.bias", "attn_v.bias")),
    Architecture("qwen3", ("qwen3",), False, ("attn_q_norm.weight", "attn_k_norm.weight")),
    Architecture("granite", ("granite",), gguf_pairs_adjacent=True, has_multipliers=True),
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a graph is built from, whatever the file's format."""

    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_epsilon: float
    rope: Rope
    max_model_len: int
    tied: bool | None  # None: tied when the file has no head of its own
    attention_scale: float
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0


def supported() -> str:
    """The architectures' names for messages."""
    return ", ".join(sorted({name for row in ARCHITECTURES for name in (row.name, *row.huggingface_names)}))


def config_from_gguf(metadata: Mapping[str, Any], origin: str, rope_divisors: tuple[float, ...] = ()) -> ModelConfig:
    """From GGUF metadata. `rope_divisors`: the tensor rope_freqs.weight where the file has one.

    Raises ModelError naming the missing key, the architecture that is not supported, or the feature that is not.
    """
    name = Fields(metadata, origin).text("general.architecture")
    row = next((row for row in ARCHITECTURES if row.name == name), None)
    if row is None:
        raise ModelError(f"{origin}: architecture {name[:80]!r} is not supported; supported are {supported()}.")
    fields = Fields(metadata, origin, f"{name}.")
    for key in ("expert_count", "attention.clamp_kqv", "attention.max_alibi_bias", "rope.dimension_sections"):
        if fields.get(key):
            raise ModelError(f"{origin}: {name}.{key} is set; models with that feature are not supported.")
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    head_size = fields.integer("attention.key_length", hidden_size // num_heads)
    if (value_size := fields.integer("attention.value_length", head_size)) != head_size:
        raise ModelError(f"{origin}: heads of {head_size} for keys and {value_size} for values are not supported.")
    if (rotated := fields.integer("rope.dimension_count", head_size)) != head_size:
        raise ModelError(f"{origin}: only {rotated} of {head_size} components of a head rotate; that is not supported.")
    max_model_len = fields.integer("context_length")
    _refuse_window(fields.get("attention.sliding_window"), max_model_len, origin)
    scaling = _gguf_scaling(fields, origin, max_model_len, rope_divisors)
    config = ModelConfig(
        architecture=row,
        num_layers=fields.integer("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_size=head_size,
        rms_epsilon=fields.number("attention.layer_norm_rms_epsilon"),
        rope=Rope(fields.number("rope.freq_base", 10000.0), head_size, scaling),
        max_model_len=_scaled_length(max_model_len, scaling, fields.has("rope.scaling.original_context_length")),
        tied=None,
        attention_scale=fields.number("attention.scale", head_size**-0.5),
        embedding_scale=fields.number("embedding_scale", 1.0),
        residual_scale=fields.number("residual_scale", 1.0),
        logits_divisor=fields.number("logit_scale", 1.0),
    )
    return _checked(config, origin)


def config_from_huggingface(values: Mapping[str, Any], origin: str) -> ModelConfig:
    """From a config.json. Raises ModelError as config_from_gguf does."""
    fields = Fields(values, origin)
    name = fields.text("model_type")
    row = next((row for row in ARCHITECTURES if name in row.huggingface_names), None)
    if row is None:
        raise ModelError(f"{origin}: model_type {name[:80]!r} is not supported; supported are {supported()}.")
    if fields.has("quantization_config"):
        raise ModelError(f"{origin}: the checkpoint is quantized already; take the original one, a GGUF or an OpenVINO folder.")
    if (activation := fields.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{origin}: hidden_act {activation[:40]!r} is not supported.")
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_size = fields.integer("head_dim", hidden_size // num_heads)
    max_model_len = fields.integer("max_position_embeddings")
    windowed = fields.get("use_sliding_window") if "use_sliding_window" in values else name == "mistral"
    _refuse_window(fields.get("sliding_window") if windowed else None, max_model_len, origin)
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ModelError(f"{origin}: layers with sliding-window attention are not supported.")
    rope = fields.section("rope_parameters") if fields.has("rope_parameters") else fields.section("rope_scaling")
    if float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1) != 1:
        raise ModelError(f"{origin}: partial_rotary_factor other than 1 is not supported.")
    scaling = _huggingface_scaling(rope, max_model_len)
    config = ModelConfig(
        architecture=row,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_size=head_size,
        rms_epsilon=fields.number("rms_norm_eps"),
        rope=Rope(rope.number("rope_theta", fields.number("rope_theta", 10000.0)), head_size, scaling),
        max_model_len=_scaled_length(max_model_len, scaling, rope.has("original_max_position_embeddings")),
        tied=bool(fields.get("tie_word_embeddings")),
        attention_scale=fields.number("attention_multiplier", head_size**-0.5),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
    return _checked(config, origin)


def _checked(config: ModelConfig, origin: str) -> ModelConfig:
    multipliers = (config.embedding_scale, config.residual_scale, config.logits_divisor)
    if not config.architecture.has_multipliers and multipliers != (1.0, 1.0, 1.0):
        raise ModelError(
            f"{origin}: multipliers of embeddings, residuals or logits are not known for {config.architecture.name}."
        )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{origin}: {config.num_heads} heads cannot share {config.num_kv_heads} key-value heads.")
    if config.head_size % 2:
        raise ModelError(f"{origin}: heads of odd size {config.head_size} cannot rotate.")
    divisors = config.rope.scaling.divisors if config.rope.scaling else ()
    if divisors and len(divisors) != config.head_size // 2:
        raise ModelError(f"{origin}: rope_freqs.weight has {len(divisors)} values for {config.head_size // 2} pairs.")
    return config


def _refuse_window(window: Any, max_model_len: int, origin: str) -> None:
    if window and not (isinstance(window, int) and window >= max_model_len):
        raise ModelError(f"{origin}: sliding-window attention ({window!r} tokens) is not supported.")


def _scaled_length(max_model_len: int, scaling: RopeScaling | None, original_given: bool) -> int:
    """The context that scaling reaches. Where yarn names no original length, the stated one is the original."""
    if scaling is None or scaling.kind in ("llama3", "explicit") or not (original_given or scaling.kind == "yarn"):
        return max_model_len
    return max(max_model_len, int(scaling.original_max_tokens * scaling.factor))


def _gguf_scaling(fields: Fields, origin: str, max_model_len: int, divisors: tuple[float, ...]) -> RopeScaling | None:
    known = {"type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_beta_fast", "yarn_beta_slow"}
    prefix = fields.prefix + "rope.scaling."
    unknown = sorted(key for key in fields.values if key.startswith(prefix) and key.removeprefix(prefix) not in known)
    kind = fields.text("rope.scaling.type", "linear" if fields.has("rope.scale_linear") else "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear", "yarn") or (unknown and kind != "none"):
        raise ModelError(
            f"{origin}: rope scaling {kind[:40]!r} {' '.join(unknown)[:200]} is not supported; linear, yarn and "
            "rope_freqs.weight are."
        )
    if kind == "none" or factor == 1.0:
        return RopeScaling("explicit", divisors=divisors) if divisors else None
    if divisors:
        raise ModelError(f"{origin}: both rope_freqs.weight and rope scaling {kind!r} are given; that is not supported.")
    original = fields.integer("rope.scaling.original_context_length", max_model_len)
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0),
    )


def _huggingface_scaling(rope: Fields, max_model_len: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    original = rope.integer("original_max_position_embeddings", max_model_len)
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"), original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise ModelError(f"{rope.origin}: high_freq_factor must exceed low_freq_factor.")
        original = rope.integer("original_max_position_embeddings")
        return RopeScaling("llama3", rope.number("factor"), original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn" and rope.get("truncate") is not False:
        factor = rope.number("factor")
        attention = rope.number("attention_factor", _yarn_attention(rope, factor))
        fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
        return RopeScaling("yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention)
    raise ModelError(f"{rope.origin}: rope scaling {str(kind)[:40]!r} is not supported; linear, llama3 and yarn are.")


def _yarn_attention(rope: Fields, factor: float) -> float:
    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpened(rope.number("mscale")) / sharpened(rope.number("mscale_all_dim"))
    return sharpened(1.0)
