import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.gguf_tokenizer import build_tokenizer
from headrace.protocol.errors import ModelError, RequestError
from headrace.text.tokenizer import TextTokenizer
from tests.text.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, tokenizer_of

MARKERS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<tool>", "<|im_", "im_end|>", "<", "▁", "<0x41>"]
WORDS = ["hello", " hello", " world", "h", "123", "\n", "\r\n", "  ", "é", "e\u0301", "🫠", "龜", "\u00a0", "a"]
PIECES = st.sampled_from(MARKERS + WORDS)
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join))

BYTE_LEVEL = build_tokenizer(byte_level_metadata()).tokenizer_json
SENTENCEPIECE = build_tokenizer(sentencepiece_metadata()).tokenizer_json
NO_PREFIX = build_tokenizer(sentencepiece_metadata(add_space_prefix=False)).tokenizer_json


def _changed(text: str, **parts: object) -> str:
    return json.dumps(json.loads(text) | parts)


def _stripping(text: str, **flags: bool) -> str:
    document = json.loads(text)
    for token in document["added_tokens"]:
        token.update(flags)
    return json.dumps(document)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
KINDS = {
    "byte level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "sentencepiece without prefix": NO_PREFIX,
    "first stretch prefixed": _changed(SENTENCEPIECE, normalizer=None, pre_tokenizer=METASPACE),
    "first stretch prefixed, in a sequence": _changed(
        SENTENCEPIECE, normalizer=None, pre_tokenizer={"type": "Sequence", "pretokenizers": [METASPACE]}
    ),
    "markers swallow space after": _stripping(SENTENCEPIECE, rstrip=True),
    "markers swallow space before": _stripping(BYTE_LEVEL, lstrip=True),
    "markers are words": _stripping(BYTE_LEVEL, single_word=True),
    "words prefixed": _changed(
        BYTE_LEVEL, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    ),
    "space decoder": _changed(SENTENCEPIECE, decoder={**METASPACE, "prepend_scheme": "always"}),
}


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=40, deadline=None)
def test_ids_are_those_of_the_library(kind: str, text: str) -> None:
    """GGU-05: the text after an added token is encoded as the reference does it."""
    ours, reference = _both(kind)
    assert ours.encode(text) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=40, deadline=None)
def test_markers_as_plain_text_are_those_of_the_library(kind: str, text: str) -> None:
    """TPL-07: no control id can come of a text whose markers are not parsed."""
    ours, reference = _both(kind)
    reference.encode_special_tokens = True
    ids = ours.encode(text, parse_special=False)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert not set(ids) & set(ours.special_tokens.values()) - {0}  # 0 is <unk>, which no marker is needed for


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece without prefix", "space decoder"])
@given(text=TEXTS, skip=st.booleans())
@settings(max_examples=40, deadline=None)
def test_decoded_text_is_that_of_the_library(kind: str, text: str, skip: bool) -> None:
    ours, reference = _both(kind)
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip).rstrip("\ufffd")


@given(ids=st.lists(st.integers(0, 270), max_size=12))
@settings(max_examples=100, deadline=None)
def test_bytes_of_tokens_are_the_text(byte_level: TextTokenizer, ids: list[int]) -> None:
    data = b"".join(map(byte_level.token_bytes, ids))
    reference = tokenizers.Tokenizer.from_str(BYTE_LEVEL)
    assert data.decode("utf-8", "replace") == reference.decode(ids, skip_special_tokens=True)


_CACHE: dict[str, tuple[TextTokenizer, str]] = {}


def _both(kind: str) -> tuple[TextTokenizer, tokenizers.Tokenizer]:
    if kind not in _CACHE:
        _CACHE[kind] = (TextTokenizer.from_json(KINDS[kind]), KINDS[kind])
    ours, text = _CACHE[kind]
    return ours, tokenizers.Tokenizer.from_str(text)


def test_default_chat_has_the_ids_that_the_model_was_trained_with(default_tokenizer: TextTokenizer) -> None:
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    expected = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert default_tokenizer.encode(text) == expected
    assert default_tokenizer.decode(expected, skip_special_tokens=False) == text


def test_sch_13_one_tokenizer_in_32_threads(default_tokenizer: TextTokenizer) -> None:
    text = "<|im_start|>user\nfour 444 🫠 words<|im_end|>\n"
    expected = {flag: default_tokenizer.encode(text, parse_special=flag) for flag in (True, False)}
    assert expected[True] != expected[False]

    def work(number: int) -> bool:
        flag = number % 2 == 0
        ids = default_tokenizer.encode(text, parse_special=flag)
        return ids == expected[flag] and default_tokenizer.decode(ids, skip_special_tokens=False) == text

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(640)))


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("begins_with_bos", [True, False])
def test_ggu_04_flag_obeyed_and_never_two_bos(adds_bos: bool, begins_with_bos: bool) -> None:
    tokenizer = tokenizer_of(byte_level_metadata(add_bos_token=adds_bos))
    bos = tokenizer.special_tokens["<s>"]
    ids = tokenizer.encode("<s>hello" if begins_with_bos else "hello")
    assert ids.count(bos) == int(adds_bos or begins_with_bos)
    assert (ids[0] == bos) == (adds_bos or begins_with_bos)
    assert tokenizer.encode("hello", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("adds_bos", [True, False])
def test_ggu_04_flag_wins_over_the_files_post_processor(adds_bos: bool) -> None:
    post_processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [267], "tokens": ["<s>"]}},
    }
    text = _changed(BYTE_LEVEL, post_processor=post_processor)
    tokenizer = TextTokenizer.from_json(text, bos_token_id=267, add_bos_token=adds_bos)
    assert tokenizer.special_tokens["<s>"] == 267
    assert tokenizer.encode("hello").count(267) == int(adds_bos)


def test_truncation_and_padding_in_the_file_do_not_apply() -> None:
    limits = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = TextTokenizer.from_json(_changed(BYTE_LEVEL, truncation=limits))
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_true_vocabulary_counts_gaps() -> None:
    document = json.loads(BYTE_LEVEL)
    document["model"]["vocab"].pop("é".encode().decode("latin-1"), None)
    document["model"]["merges"] = []
    dropped = document["model"]["vocab"].pop("hello")
    tokenizer = TextTokenizer.from_json(json.dumps(document))
    assert tokenizer.vocab_size == 271
    assert tokenizer.token_text(dropped) is None
    assert tokenizer.token_bytes(dropped) == b""
    assert tokenizer.decode([dropped, ord("a") - 0x21 + 33]) != ""
    assert tokenizer.token_bytes(271) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([271, -1]) == ""


def test_bytes_of_a_token_for_a_decoder_of_another_kind() -> None:
    tokenizer = TextTokenizer.from_json(KINDS["space decoder"])
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" hello world"
    assert tokenizer.token_bytes(tokenizer.special_tokens["</s>"]) == b""


@pytest.mark.parametrize("parse_special", [True, False])
def test_utf_07_lone_surrogates_are_refused(byte_level: TextTokenizer, parse_special: bool) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_level.encode("a\ud83d b", parse_special=parse_special)


def test_a_file_that_cannot_be_read_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="cannot be read"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(BYTE_LEVEL, encoding="utf-8")
    assert TextTokenizer.from_file(tmp_path / "tokenizer.json").encode("hello") == [tokenizer_id("hello")]


def tokenizer_id(token: str) -> int:
    return int(json.loads(BYTE_LEVEL)["model"]["vocab"][token])


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The gateway's event loop is such a thread: it must not stand still for a prompt of megabytes."""
    tokenizer = TextTokenizer.from_json(BYTE_LEVEL)
    text = "hello world " * 50_000
    with ThreadPoolExecutor(1) as pool:
        started_ns = last_ns = time.monotonic_ns()
        future = pool.submit(tokenizer.encode, text)
        longest_ns = 0
        while not future.done():
            now_ns = time.monotonic_ns()
            longest_ns, last_ns = max(longest_ns, now_ns - last_ns), now_ns
        longest_ns = max(longest_ns, time.monotonic_ns() - last_ns)
    assert longest_ns < (time.monotonic_ns() - started_ns) / 2
