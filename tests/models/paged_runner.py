"""Runs a paged graph by the names of protocol/graph.py: the smallest executor there can be."""

from typing import Any

import numpy as np
import openvino as ov

from headrace.protocol import graph as names

Row = tuple[list[int], int, list[int]]  # token ids to compute, tokens computed before, block ids


class PagedRunner:
    def __init__(self, model: ov.Model, *, num_blocks: int = 16, kv_precision: str = "f32") -> None:
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": kv_precision,
        }
        self.request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
        for port in self.request.model_inputs:
            name = port.get_any_name()
            if name.startswith((names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX)):
                shape = [num_blocks, *[size.get_length() for size in list(port.get_partial_shape())[1:]]]
                tensor = ov.Tensor(port.get_element_type(), shape)
                tensor.data[:] = 0
                self.request.set_tensor(name, tensor)

    def step(self, rows: list[Row], wanted: list[int] | None = None) -> dict[str, np.ndarray]:
        """All outputs, without the middle axis. `wanted`: indices of tokens whose logits are asked for; None: all."""
        ends = np.cumsum([0, *[len(ids) for ids, _, _ in rows]])
        inputs = {
            names.INPUT_IDS: np.concatenate([ids for ids, _, _ in rows]).astype(np.int64),
            names.POSITION_IDS: np.concatenate([np.arange(past, past + len(ids)) for ids, past, _ in rows]).astype(np.int64),
            names.PAST_LENS: np.array([past for _, past, _ in rows], np.int32),
            names.SUBSEQUENCE_BEGINS: ends.astype(np.int32),
            names.BLOCK_INDICES: np.concatenate([blocks for _, _, blocks in rows]).astype(np.int32),
            names.BLOCK_INDICES_BEGINS: np.cumsum([0, *[len(blocks) for _, _, blocks in rows]]).astype(np.int32),
            names.MAX_CONTEXT_LEN: np.array(max(past + len(ids) for ids, past, _ in rows), np.int32),
            names.SAMPLED_TOKENS_INDICES: np.array(range(ends[-1]) if wanted is None else wanted, np.int32),
        }
        for name, value in inputs.items():
            self.request.set_tensor(name, ov.Tensor(value))
        self.request.infer()
        outputs = (names.LOGITS, names.TOP_VALUES, names.TOP_INDICES, names.LOG_NORMALIZER)
        return {name: self.request.get_tensor(name).data[:, 0].copy() for name in outputs}
