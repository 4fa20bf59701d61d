"""Special ids, templates and sampling defaults are found wherever models keep them."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.models.huggingface_folder import generation_defaults, read_tokenizer
from headrace.protocol.errors import ModelError
from headrace.protocol.manifest import GenerationDefaults
from tests.models.tiny_models import make, write_huggingface


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_huggingface(tmp_path / "m", make("llama"))


def change(path: Path, **values: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**old, **values}.items() if value is not None}))


def test_ids_come_from_all_files_that_name_them(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[2, 0])
    files = read_tokenizer(folder)
    assert (files.bos_token_id, files.eos_token_ids, files.vocab_size, files.add_bos_token) == (1, [0, 2], 300, False)
    change(folder / "tokenizer_config.json", bos_token=None, add_bos_token=True)
    files = read_tokenizer(folder)
    assert (files.bos_token_id, files.add_bos_token) == (1, True)


def test_a_template_processor_that_prepends_bos_counts(folder: Path) -> None:
    """GGU-04: the flag where it is given, else what the tokenizer itself would do."""
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processors = [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": single}]
    change(folder / "tokenizer.json", post_processor={"type": "Sequence", "processors": processors})
    assert read_tokenizer(folder).add_bos_token
    change(folder / "tokenizer_config.json", add_bos_token=False)
    assert not read_tokenizer(folder).add_bos_token


def test_templates_in_their_three_places(folder: Path) -> None:
    assert read_tokenizer(folder).chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert read_tokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert read_tokenizer(folder).chat_template == "J"


def test_a_folder_without_tokenizer_json_says_how_to_get_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="save_pretrained"):
        read_tokenizer(folder)


def test_impossible_ids_are_refused(folder: Path) -> None:
    change(folder / "tokenizer.json", added_tokens=[{"content": "x", "id": -1}])
    with pytest.raises(ModelError, match="impossible ids"):
        read_tokenizer(folder)


def test_sampling_defaults() -> None:
    values = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2, "max_length": 20}
    assert generation_defaults(values, "m") == GenerationDefaults(0.7, 0.8, 20, None, 1.05)
    assert generation_defaults({**values, "do_sample": False}, "m") == GenerationDefaults()
    assert generation_defaults({}, "m") == GenerationDefaults()


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 3.0}, {"top_k": -2}, {"temperature": 1e9}])
def test_sampling_defaults_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="sampling defaults"):
        generation_defaults(values, "m")
