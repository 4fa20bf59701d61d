"""The forward pass of a llama-like model in float64 numpy, one token after another position: slow, short, and independent."""

import numpy as np

from tests.models.tiny_models import HEADS, KV_HEADS, LAYERS, Tiny


def logits(model: Tiny, ids: list[int], speeds: np.ndarray | None = None, magnitude: float = 1.0) -> np.ndarray:
    """[tokens, rows] of float64. `speeds`: [head_size / 2] radians per position, by default the plain rotary ones."""
    if speeds is None:
        speeds = plain_speeds(model)
    weights = {name: tensor.astype(np.float64) for name, tensor in model.tensors.items()}
    x = weights["token_embd.weight"][ids] * model.embedding_scale
    for layer in range(LAYERS):
        w = {name.split(".", 2)[2]: tensor for name, tensor in weights.items() if name.startswith(f"blk.{layer}.")}
        h = _norm(x, w["attn_norm.weight"], model.epsilon)
        x = x + model.residual_scale * _attention(model, w, h, speeds, magnitude)
        h = _norm(x, w["ffn_norm.weight"], model.epsilon)
        gate = h @ w["ffn_gate.weight"].T
        x = x + model.residual_scale * ((gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T)
    head = weights.get("output.weight", weights["token_embd.weight"])
    return _norm(x, weights["output_norm.weight"], model.epsilon) @ head.T / model.logits_divisor


def plain_speeds(model: Tiny) -> np.ndarray:
    return np.array([model.theta ** (-2 * pair / model.head_size) for pair in range(model.head_size // 2)])


def _norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def _attention(model: Tiny, w: dict[str, np.ndarray], h: np.ndarray, speeds: np.ndarray, magnitude: float) -> np.ndarray:
    def heads(stem: str, count: int, rotates: bool) -> np.ndarray:
        x = (h @ w[f"{stem}.weight"].T + w.get(f"{stem}.bias", 0.0)).reshape(len(h), count, model.head_size)
        if f"{stem}_norm.weight" in w:
            x = _norm(x, w[f"{stem}_norm.weight"], model.epsilon)
        return _turned(x, speeds, magnitude, model.adjacent) if rotates else x

    query = heads("attn_q", HEADS, True)
    key, value = heads("attn_k", KV_HEADS, True), heads("attn_v", KV_HEADS, False)
    result = np.empty_like(query)
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        scores = query[:, head] @ key[:, shared].T * model.scale
        scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        result[:, head] = share / share.sum(-1, keepdims=True) @ value[:, shared]
    return result.reshape(len(h), -1) @ w["attn_output.weight"].T


def _turned(x: np.ndarray, speeds: np.ndarray, magnitude: float, adjacent: bool) -> np.ndarray:
    half = x.shape[-1] // 2
    result = np.empty_like(x)
    for position in range(len(x)):
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if adjacent else (pair, pair + half)
            cosine, sine = magnitude * np.cos(position * speeds[pair]), magnitude * np.sin(position * speeds[pair])
            a, b = x[position, :, first], x[position, :, second]
            result[position, :, first], result[position, :, second] = a * cosine - b * sine, b * cosine + a * sine
    return result
