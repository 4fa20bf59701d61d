"""Small tokenizers for tests, made of GGUF metadata written by hand."""

from typing import Any

from headrace.models.gguf_tokenizer import build_tokenizer
from headrace.text.tokenizer import TextTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_alphabet() -> list[str]:
    """The 256 characters of the byte-level alphabet, in the order of the bytes."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """Kind gpt2: every byte, a few merges, markers <s>, <|im_start|>, <|im_end|> and the plain added token <tool>."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "i m", "im _", "Ġ hello", "ð Ł", "ðŁ «", "Ã ©"]
    tokens = byte_alphabet()
    tokens += [merge.replace(" ", "") for merge in merges]
    first_added = len(tokens)
    added = {"<s>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<tool>": USER_DEFINED}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + list(added),
        "tokenizer.ggml.token_type": [NORMAL] * first_added + list(added.values()),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": first_added,
        "tokenizer.ggml.eos_token_id": first_added + 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Kind llama: <unk>, <s>, </s>, byte tokens, letters and a few longer pieces with scores."""
    pieces = ["▁", *"abcdefghilmnoprstuw", "▁h", "he", "ll", "▁he", "llo", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|user|>", "<tool>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), CONTROL, USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))] + [0.0, 0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def tokenizer_of(metadata: dict[str, Any]) -> TextTokenizer:
    """The tokenizer that a gateway makes of these metadata."""
    files = build_tokenizer(metadata)
    return TextTokenizer.from_json(files.tokenizer_json, bos_token_id=files.bos_token_id, add_bos_token=files.add_bos_token)
