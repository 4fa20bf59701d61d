"""Writes paged graphs to a folder and reads them back.

Owns: the stored form. Runs in: launch (writes), worker (reads, through a callable it is given). Must not know: architectures.

OpenVINO writes a graph with paged attention, but does not read one: its reader knows no such operation. So each attention
is cut out before writing: what flows into it becomes a result, what flows out of it a parameter, and a note says which.
Reading puts the attentions back. The file itself is an ordinary IR whose weights are mapped, not copied.
"""

import json
from pathlib import Path
from typing import Any

import openvino as ov
import openvino.op
import openvino.opset13 as ops

from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError

ATTENTION = "PagedAttentionExtension"
NOTE = ["headrace", "attentions"]  # where in the model's own notes the cuts are described
INFO_KEYS = ("num_k_heads", "k_head_size", "num_v_heads", "v_head_size")
OUTPUTS = (names.LOGITS, names.TOP_VALUES, names.TOP_INDICES, names.LOG_NORMALIZER)


def save_graph(model: ov.Model, folder: Path) -> None:
    """Write `model` as folder/openvino_model.xml and .bin. The model is taken apart: it cannot be used afterwards."""
    cut = _cut(model)
    ov.save_model(cut, str(folder / names.MODEL_FILE), compress_to_fp16=False)


def load_graph(folder: Path) -> ov.Model:
    """The graph that save_graph wrote, whole again. Raises ModelError when there is none or it is damaged."""
    path = folder / names.MODEL_FILE
    if not path.is_file():
        raise ModelError(f"{folder} holds no {names.MODEL_FILE}: it is no prepared model.")
    try:
        model = ov.Core().read_model(str(path))
        note = json.loads(model.get_rt_info(NOTE).astype(str))
        _mend(model, note)
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read; remove the folder to have it prepared again: {str(error)[:500]}") from error
    return model


def _cut(model: ov.Model) -> ov.Model:
    """A model without attentions: a note tells _mend what to put back where."""
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == ATTENTION]
    results: dict[tuple[str, int], str] = {}
    outputs: list[Any] = []
    step_parameters: dict[str, tuple[str, str]] = {}
    kept = [node for node in model.get_parameters() if node.output(0).get_any_name() in (names.INPUT_IDS, names.POSITION_IDS)]
    kept += [node for node in model.get_parameters() if node.output(0).get_any_name() == names.SAMPLED_TOKENS_INDICES]
    entries = []
    for number, node in enumerate(attentions):
        sources = []
        for port in range(node.get_input_size()):
            source = node.input_value(port)
            producer = source.get_node()
            if producer.get_type_name() == "Parameter":
                name = source.get_any_name()
                step_parameters[name] = (source.get_element_type().get_type_name(), source.get_partial_shape().to_string())
            else:
                key = (producer.get_friendly_name(), source.get_index())
                if key not in results:
                    results[key] = f"attention.input.{len(results)}"
                    source.get_tensor().add_names({results[key]})
                    outputs.append(source)
                name = results[key]
            sources.append(name)
        attended = node.output(0)
        stand_in = ops.parameter(attended.get_partial_shape(), attended.get_element_type())
        stand_in.output(0).set_names({f"attention.output.{number}"})
        for target in attended.get_target_inputs():
            target.replace_source_output(stand_in.output(0))
        kept.append(stand_in)
        info = node.get_rt_info()
        entries.append({"inputs": sources, "info": {key: info[key].astype(int) for key in INFO_KEYS if key in info}})
    cut = ov.Model([*[model.output(name).get_node().input_value(0) for name in OUTPUTS], *outputs], kept, "headrace")
    cut.set_rt_info(json.dumps({"parameters": step_parameters, "attentions": entries}), NOTE)
    return cut


def _mend(model: ov.Model, note: dict[str, Any]) -> None:
    """Put back the attentions that _cut took out."""
    added: dict[str, Any] = {}
    for name, (element_type, shape) in note["parameters"].items():
        parameter = ops.parameter(ov.PartialShape(shape), getattr(ov.Type, element_type))
        parameter.output(0).set_names({name})
        parameter.set_friendly_name(name)
        added[name] = parameter
    model.add_parameters(list(added.values()))
    results = {name: output for output in model.outputs for name in output.get_names() if name.startswith("attention.input.")}
    for number, entry in enumerate(note["attentions"]):
        sources = [
            added[name].output(0) if name in added else results[name].get_node().input_value(0) for name in entry["inputs"]
        ]
        node = openvino.op._PagedAttentionExtension(sources)
        for key, value in entry["info"].items():
            node.get_rt_info()[key] = value
        stand_in = model.input(f"attention.output.{number}").get_node()
        for target in stand_in.output(0).get_target_inputs():
            target.replace_source_output(node.output(0))
        model.remove_parameter(stand_in)
    for output in results.values():
        model.remove_result(output.get_node())
    model.validate_nodes_and_infer_types()
