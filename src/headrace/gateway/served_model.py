"""Reads what a gateway needs of a prepared folder: the model card, the tokenizer, the chat template.

Owns: ServedModel. Runs in: gateway, once at start. Must not know: weights, how the folder was made.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.gateway.deltas import ModelCard
from headrace.protocol.errors import ModelError
from headrace.protocol.graph import GENERATION_DEFAULTS_FILE, MANIFEST_FILE, TOKENIZER_FILE
from headrace.protocol.manifest import FORMAT_VERSION, GenerationDefaults, Manifest
from headrace.text.chat_template import ChatTemplate, load_chat_template
from headrace.text.tokenizer import TextTokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as the gateway knows it. `chat_template` is None for a model that has none."""

    card: ModelCard
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None


def load_served_model(folder: Path, served_name: str | None) -> ServedModel:
    """Read the folder. Raises ModelError that names the file at fault."""
    manifest_file = folder / MANIFEST_FILE
    manifest = _read_json(manifest_file, Manifest)
    if manifest.format_version != FORMAT_VERSION:
        raise ModelError(
            f"{manifest_file}: format {manifest.format_version} is not {FORMAT_VERSION}. Remove the folder to prepare it anew."
        )
    defaults_file = folder / GENERATION_DEFAULTS_FILE
    defaults = _read_json(defaults_file, GenerationDefaults) if defaults_file.exists() else GenerationDefaults()
    card = ModelCard(
        id=served_name or manifest.name,
        created=int(manifest_file.stat().st_mtime),
        vocab_size=manifest.vocab_size,
        max_model_len=manifest.max_model_len,
        bos_token_id=manifest.bos_token_id,
        eos_token_ids=frozenset(manifest.eos_token_ids),
        add_bos_token=manifest.add_bos_token,
        defaults=defaults,
    )
    tokenizer = TextTokenizer.from_file(
        folder / TOKENIZER_FILE, bos_token_id=manifest.bos_token_id, add_bos_token=manifest.add_bos_token
    )
    template = load_chat_template(folder, tokenizer, bos_token_id=manifest.bos_token_id, eos_token_ids=manifest.eos_token_ids)
    return ServedModel(card, tokenizer, template)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from None


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not what a prepared model has: {error}.") from None
