"""A GGUF file's tokenizer metadata -> a Hugging Face tokenizer.json, its chat template and its special ids.

Owns: how the vocabulary kinds of GGUF map to that format. Runs in: preparing a model. Must not know: weights.

The ids that the result gives must be those that the model was trained with. So a kind or a pre-tokenizer that is not known for
certain is refused by name; there is no default to fall back to.
"""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.protocol.errors import ModelError

# Token types of GGUF (tokenizer.ggml.token_type).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Control tokens that end a turn or a text, by their text: many files name only one of them by its id.
_END_MARKERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)

_Stage = dict[str, Any]


def _split(regex: str) -> _Stage:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> _Stage:
    # No word gets a space put before it: byte-level models of this format encode a text as it stands.
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGIT_BY_DIGIT: _Stage = {"type": "Digits", "individual_digits": True}

# Pieces that the word patterns of several model families share.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(letters: str, digits: str, *, not_symbol: str = r"\s\p{L}\p{N}") -> str:
    """The GPT-4 kind of pattern: contractions, words with one leading symbol, numbers, symbols with line ends, space."""
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^{not_symbol}]+[\r\n]*|{_LINES_AND_SPACE}"


def _cased_words(suffix: str, digits: str) -> str:
    """The GPT-4o kind of pattern: words split where the case changes from lower to upper."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACE}"
    )


# Cased letters as hexadecimal ranges, since editors may rewrite some of the characters themselves.
_DEEPSEEK_CASED = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
    "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 "
    "1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC "
    "1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B "
    "A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB "
    "10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_LETTERS = (
    r"\s?[" + "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in _DEEPSEEK_CASED.split()) + "]+"
)
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_LINES_AND_SPACE}"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How a model family cuts text into words before byte-pair merging, and what else its files take for granted."""

    stages: tuple[_Stage, ...]
    is_nfc: bool = False  # text is brought into Unicode normal form C first
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    adds_bos: bool = False  # where tokenizer.ggml.add_bos_token is absent


_GPT2 = (_byte_level(True),)
_DIGITS_GPT2 = (_DIGIT_BY_DIGIT, _byte_level(True))
_QWEN2 = (_split(_words(r"\p{L}", r"\p{N}")), _byte_level(False))
_GPT4 = (_split(_words(r"\p{L}", r"\p{N}{1,3}")), _byte_level(False))

# tokenizer.ggml.pre -> what it stands for. Each is the pre-tokenizer of the family's own tokenizer.json.
_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    "gpt-2": _PreTokenizer(_GPT2),
    "mpt": _PreTokenizer(_GPT2, is_nfc=True),
    "smollm": _PreTokenizer(_DIGITS_GPT2),
    "command-r": _PreTokenizer(_DIGITS_GPT2, is_nfc=True),
    "llama-bpe": _PreTokenizer(_GPT4, ignore_merges=True, adds_bos=True),
    "dbrx": _PreTokenizer(_GPT4),
    "glm4": _PreTokenizer(_GPT4),
    "qwen2": _PreTokenizer(_QWEN2, is_nfc=True),
    "qwen35": _PreTokenizer(
        (_split(_words(r"[\p{L}\p{M}]", r"\p{N}", not_symbol=r"\s\p{L}\p{M}\p{N}")), _byte_level(False)), is_nfc=True
    ),
    "gpt-4o": _PreTokenizer((_split(_cased_words(f"{_CONTRACTION}?", r"\p{N}{1,3}")), _byte_level(False))),
    "tekken": _PreTokenizer((_split(_cased_words("", r"\p{N}")), _byte_level(False)), ignore_merges=True, adds_bos=True),
    "falcon": _PreTokenizer(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            _byte_level(True),
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
    "deepseek-llm": _PreTokenizer(
        (
            *map(_split, ("[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_CJK)),
            *(_DIGIT_BY_DIGIT, _byte_level(False)),
        )
    ),
    "deepseek-coder": _PreTokenizer(
        (*map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)), _DIGIT_BY_DIGIT, _byte_level(False))
    ),
    "deepseek-v3": _PreTokenizer(
        (_split(r"\p{N}{1,3}"), _split(r"[一-龥぀-ゟ゠-ヿ]+"), _split(_DEEPSEEK3_WORDS), _byte_level(False))
    ),
}
for _name, _aliases in (
    ("gpt-2", ("phi-2",)),
    ("mpt", ("olmo",)),
    ("smollm", ("starcoder", "refact")),
    ("llama-bpe", ("llama3", "llama-v3")),
    ("gpt-4o", ("llama4",)),
    ("qwen2", ("deepseek-r1-qwen", "stablelm2", "megrez")),
    ("glm4", ("chatglm-bpe",)),
):
    _PRE_TOKENIZERS.update(dict.fromkeys(_aliases, _PRE_TOKENIZERS[_name]))


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a prepared folder needs of the tokenizer. `vocab_size` is the true one: ids at or above it name no token."""

    tokenizer_json: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: list[int]  # at least one, the file's own first
    add_bos_token: bool
    vocab_size: int


def build_tokenizer(metadata: Mapping[str, Any]) -> TokenizerFiles:
    """Read the tokenizer out of GGUF metadata (key -> plain value; integers of any width, lists or arrays).

    Raises ModelError that names the key or the kind that is missing, wrong or not supported.
    """
    kind = _string(metadata, "tokenizer.ggml.model")
    build = _KINDS.get(kind)
    if build is None:
        raise ModelError(f"The tokenizer kind '{kind}' is not supported; supported are: {', '.join(sorted(_KINDS))}.")
    vocabulary = _Vocabulary.read(metadata)
    document, adds_bos_by_default = build(metadata, vocabulary)
    bos_token_id = vocabulary.token_id(metadata, "bos_token_id")
    add_bos_token = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default))
    if add_bos_token and bos_token_id is None:
        raise ModelError("The file wants a begin token before each text, but tokenizer.ggml.bos_token_id is missing.")
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer_json=json.dumps(document, ensure_ascii=False, separators=(",", ":")),
        chat_template=str(template) if template else None,
        bos_token_id=bos_token_id,
        eos_token_ids=_end_token_ids(metadata, vocabulary),
        add_bos_token=add_bos_token,
        vocab_size=len(vocabulary.tokens),
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens and their types by id, without the unused ones that pad the end; `ids` leaves empty texts out."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> "_Vocabulary":
        tokens = [str(token) for token in _array(metadata, "tokenizer.ggml.tokens")]
        types = [_NORMAL] * len(tokens)
        if metadata.get("tokenizer.ggml.token_type") is not None:
            key = "tokenizer.ggml.token_type"
            types = [_integer(key, value) for value in _array(metadata, key, len(tokens))[: len(tokens)]]
        used = len(tokens)
        while used and types[used - 1] == _UNUSED:
            used -= 1
        if not used:
            raise ModelError("tokenizer.ggml.tokens holds no token that is in use.")
        ids: dict[str, int] = {}
        for token_id, token in enumerate(tokens[:used]):
            if not token:
                continue
            if token in ids:
                raise ModelError(f"tokenizer.ggml.tokens holds {token[:40]!r} twice: ids {ids[token]} and {token_id}.")
            ids[token] = token_id
        return cls(tokens[:used], types[:used], ids)

    def token_id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        """The id under tokenizer.ggml.<name>; None when absent. ModelError when it names no token."""
        key = f"tokenizer.ggml.{name}"
        value = metadata.get(key)
        if value is None:
            return None
        token_id = _integer(key, value)
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(f"{key} is {token_id}, but the vocabulary has {len(self.tokens)} tokens.")
        return token_id

    def added_tokens(self, keeps_space_after: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Tokens that are looked for in the text before anything else. Only control tokens are special."""
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": not keeps_space_after(token),
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]


def _document(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **parts: Any) -> dict[str, Any]:
    """A tokenizer.json around a byte-pair model. BOS is left to the caller's add_bos_token, so there is no post-processor."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(parts.get("keeps_space_after", lambda _: True)),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": None,
        "decoder": parts["decoder"],
        "model": model | parts["model"],
    }


def _build_byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Kind `gpt2`: byte-level BPE. The document, and whether BOS is added where the file does not say."""
    name = _string(metadata, "tokenizer.ggml.pre")
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise ModelError(
            f"The pre-tokenizer '{name}' (tokenizer.ggml.pre) is not supported; "
            f"supported are: {', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    document = _document(
        vocabulary,
        _listed_merges(metadata, vocabulary),
        normalizer={"type": "NFC"} if pre_tokenizer.is_nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(pre_tokenizer.stages)},
        decoder=_byte_level(True),
        model={"ignore_merges": pre_tokenizer.ignore_merges},
    )
    return document, pre_tokenizer.adds_bos


def _build_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    """Kind `llama`: SentencePiece BPE with byte fallback. Every stretch of text between control tokens is encoded by itself."""
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        value = metadata.get(key)
        if value is not None and (len(value) if hasattr(value, "__len__") else bool(value)):
            raise ModelError(f"{key} is set: this way of normalizing text is not supported for the tokenizer kind 'llama'.")
    space_first = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown_id = vocabulary.token_id(metadata, "unknown_token_id")
    if unknown_id is None and _UNKNOWN in vocabulary.types:
        unknown_id = vocabulary.types.index(_UNKNOWN)
    has_merges = metadata.get("tokenizer.ggml.merges") is not None
    normalizers: list[_Stage] = [{"type": "Prepend", "prepend": "▁"}] if space_first else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[_Stage] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space_first:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    # Phi-3's markers swallow the white space after them; nothing in the file says so but the architecture's name.
    is_phi3 = metadata.get("general.architecture") == "phi3"
    document = _document(
        vocabulary,
        _listed_merges(metadata, vocabulary) if has_merges else _merges_from_scores(metadata, vocabulary),
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={
            "unk_token": None if unknown_id is None else vocabulary.tokens[unknown_id],
            "fuse_unk": True,
            "byte_fallback": True,
        },
        keeps_space_after=lambda token: not is_phi3 or token in ("<unk>", "<s>", "<|endoftext|>"),
    )
    return document, True


_KINDS = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}


def _listed_merges(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = []
    for line in _array(metadata, "tokenizer.ggml.merges"):
        left, _, right = str(line).partition(" ")
        if left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise ModelError(f"tokenizer.ggml.merges holds {str(line)[:80]!r}, which is not made of tokens of the vocabulary.")
        merges.append((left, right))
    return merges


def _merges_from_scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE model, which keeps a score for each piece: the better, the earlier the merge.

    Each way to make a piece from two others is a merge. Those of one piece stand together, the longer left part first.
    """
    key = "tokenizer.ggml.scores"
    scores = [float(score) for score in _array(metadata, key, len(vocabulary.tokens))]
    mergeable = {t: i for t, i in vocabulary.ids.items() if vocabulary.types[i] == _NORMAL}
    ranked = []
    for piece, token_id in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[token_id], -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _end_token_ids(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[int]:
    """Ids that end a generation: those that the file names, then control tokens known by their text."""
    named = (vocabulary.token_id(metadata, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
    found = [token_id for token_id in named if token_id is not None]
    for marker in _END_MARKERS:
        token_id = vocabulary.ids.get(marker)
        # Where <|return|> ends a turn, <|end|> only ends one of its messages.
        is_inner = marker == "<|end|>" and "<|return|>" in vocabulary.ids
        if token_id is not None and vocabulary.types[token_id] == _CONTROL and not is_inner:
            found.append(token_id)
    if not found:
        raise ModelError("The file names no end token: tokenizer.ggml.eos_token_id is missing.")
    return list(dict.fromkeys(found))


def _string(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str) or not value:
        raise ModelError(f"The file's metadata lack {key}.")
    return value


def _array(metadata: Mapping[str, Any], key: str, min_length: int = 0) -> Sequence[Any]:
    value = metadata.get(key)
    if value is None:
        raise ModelError(f"The file's metadata lack {key}.")
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        raise ModelError(f"{key} is not an array.")
    array: Sequence[Any] = value
    if len(array) < min_length:
        raise ModelError(f"{key} has {len(array)} values for {min_length} tokens.")
    return array


def _integer(key: str, value: Any) -> int:
    try:
        return operator.index(value)  # any width, numpy's integers too
    except TypeError as error:
        raise ModelError(f"{key} is not an integer.") from error
