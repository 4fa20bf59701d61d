"""Takes a ready OpenVINO IR (as optimum exports it) and gives it the inputs and outputs of the paged graph.

Owns: that transformation. Runs in: launch, before serving. Must not know: architectures, where graphs are stored.
"""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from headrace.models.graph import finish
from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError

STEP_INPUTS = {
    names.INPUT_IDS,
    names.POSITION_IDS,
    names.PAST_LENS,
    names.SUBSEQUENCE_BEGINS,
    names.BLOCK_INDICES,
    names.BLOCK_INDICES_BEGINS,
    names.MAX_CONTEXT_LEN,
}
AFTER_HEAD = {"Convert", "Multiply", "Divide", "Add", "Tanh"}  # what models do to logits behind the head
Node = Any


def read_ir(folder: Path, vocab_size: int) -> tuple[ov.Model, int]:
    """The paged graph of folder/openvino_model.xml, and the true vocabulary (no larger than the logits' width).

    Raises ModelError when the IR is no stateful text-generation model or cannot be read.
    """
    path = folder / names.MODEL_FILE
    try:
        model = ov.Core().read_model(str(path))
        inputs = {name for port in model.inputs for name in port.get_names()}
        if names.INPUT_IDS not in inputs or "beam_idx" not in inputs or not model.get_variables():
            raise ModelError(
                f"{path} is no stateful text-generation model; export it with "
                "optimum-cli export openvino --task text-generation-with-past."
            )
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise ModelError(f"{path} cannot be read or made paged: {str(error)[:500]}") from error
    foreign = sorted(name for port in model.inputs for name in port.get_names() if not _is_step_input(name))
    if foreign:
        raise ModelError(f"{path} needs the input {foreign[0]}, which text generation does not give.")
    logits, rest = _sampled_logits(model)
    width = logits.output(0).get_partial_shape()[2]
    if not width.is_static:
        raise ModelError(f"{path}: the logits' width is not fixed.")
    vocab_size = min(vocab_size, width.get_length())
    if logits.output(0).get_element_type() != ov.Type.f32:
        logits = ops.convert(logits, "f32")
    outputs = [node.output(index) for node, index in finish(logits, width.get_length(), vocab_size)]
    return ov.Model(outputs, rest, "headrace"), vocab_size


def _is_step_input(name: str) -> bool:
    return name in STEP_INPUTS or name.startswith((names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX))


def _sampled_logits(model: ov.Model) -> tuple[Node, list[Node]]:
    """The logits of sampled_tokens_indices only, f32 or f16 [R, 1, V], and the model's parameters with that input.

    Hidden states are picked before the head where it is found; else the logits themselves, which costs time only.
    """
    wanted = ops.parameter([-1], np.int32, name=names.SAMPLED_TOKENS_INDICES)
    wanted.output(0).set_names({names.SAMPLED_TOKENS_INDICES})
    model.add_parameters([wanted])
    result = next(node for node in model.get_results() if names.LOGITS in node.output(0).get_names() or len(model.outputs) == 1)
    logits = result.input_value(0)
    logits.get_tensor().set_names(set())
    head = logits.get_node()
    while head.get_type_name() in AFTER_HEAD:
        head = next(
            (value.get_node() for value in head.input_values() if value.get_partial_shape().rank.get_length() == 3),
            head.input_value(0).get_node(),
        )
    axis = ops.constant(np.int32(0))
    if head.get_type_name() == "MatMul":
        head.input(0).replace_source_output(ops.gather(head.input_value(0), wanted, axis).output(0))
        model.validate_nodes_and_infer_types()
        picked = logits.get_node()
    else:
        picked = ops.gather(logits, wanted, axis)
    return picked, list(model.get_parameters())
