"""Reads what stands beside the weights of a Hugging Face folder: tokenizer, chat template, sampling defaults.

Owns: those files' shapes. Runs in: launch, before serving. Must not know: weights, graphs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.models.fields import Fields
from headrace.models.gguf_tokenizer import TokenizerFiles
from headrace.protocol.errors import ModelError, RequestError
from headrace.protocol.manifest import GenerationDefaults
from headrace.protocol.sampling import SamplingParams

MAX_JSON_BYTES = 256 << 20


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The mapping in a JSON file; empty when missing is fine and it is. Raises ModelError when it cannot be read."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; it is no sound model file.")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ModelError(f"{path} is missing; the model's folder is incomplete.") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def generation_defaults(values: Mapping[str, Any], origin: str) -> GenerationDefaults:
    """From the fields of generation_config.json. A model that is not to be sampled (do_sample false) sets none.

    Raises ModelError when a value lies outside what requests may ask for.
    """
    if values.get("do_sample") is False:
        return GenerationDefaults()
    given = {name: values[name] for name in GenerationDefaults.__struct_fields__ if values.get(name) is not None}
    try:
        defaults = msgspec.convert(given, GenerationDefaults)
        SamplingParams(**given).validate(1)
    except (msgspec.ValidationError, RequestError) as error:
        raise ModelError(f"{origin}: the sampling defaults cannot be used: {error}") from error
    return defaults


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Tokenizer, template and special ids. Raises ModelError when there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json. Models saved by transformers or optimum have one; "
            f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(folder)!r}) writes it."
        )
    tokenizer = read_json(path)
    ids = _token_ids(tokenizer, str(path))
    settings = read_json(folder / "tokenizer_config.json", missing_ok=True)
    config = read_json(folder / "config.json", missing_ok=True)
    generation = read_json(folder / "generation_config.json", missing_ok=True)
    bos = _token_id(settings.get("bos_token"), ids)
    if bos is None:
        bos = next(iter(_id_list(config.get("bos_token_id"))), None)
    eos = [
        _token_id(settings.get("eos_token"), ids),
        *_id_list(generation.get("eos_token_id")),
        *_id_list(config.get("eos_token_id")),
    ]
    adds_bos = settings.get("add_bos_token")
    return TokenizerFiles(
        tokenizer_json=path.read_text(encoding="utf-8"),
        chat_template=_chat_template(folder, settings),
        bos_token_id=bos,
        eos_token_ids=sorted({token for token in eos if token is not None}),
        add_bos_token=bos is not None and (bool(adds_bos) if adds_bos is not None else _prepends(tokenizer, bos, ids)),
        vocab_size=max(ids.values(), default=-1) + 1,
    )


def _token_ids(tokenizer: dict[str, Any], origin: str) -> dict[str, int]:
    """Token -> id, added ones included. Raises ModelError when an id is no whole number of sensible size."""
    vocabulary = Fields(tokenizer, origin).section("model").get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: a list of [token, score]
        ids: dict[str, Any] = {entry[0]: index for index, entry in enumerate(vocabulary)}
    else:
        ids = dict(vocabulary)
    for added in tokenizer.get("added_tokens") or ():
        ids[added["content"]] = added["id"]
    if not ids or not all(isinstance(token, int) and 0 <= token < 1 << 24 for token in ids.values()):
        raise ModelError(f"{origin}: the vocabulary is empty or has impossible ids.")
    return ids


def _token_id(token: Any, ids: dict[str, int]) -> int | None:
    """Special tokens are named by their text or by a mapping that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return ids.get(text) if isinstance(text, str) else None


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def _prepends(tokenizer: dict[str, Any], bos: int, ids: dict[str, int]) -> bool:
    """True when the tokenizer's own post-processing puts the token before a text."""
    processor = tokenizer.get("post_processor") or {}
    steps = processor.get("processors") or [processor]
    for step in steps:
        first: dict[str, Any] = next(iter(step.get("single") or ()), {}) if step.get("type") == "TemplateProcessing" else {}
        if ids.get(first.get("SpecialToken", {}).get("id", "")) == bos:
            return True
    return False


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or read_json(folder / "chat_template.json", missing_ok=True).get("chat_template")
    if isinstance(template, list):  # several, named
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
