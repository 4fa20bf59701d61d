from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.gguf_tokenizer import build_tokenizer
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import TextTokenizer
from tests.text.test_tokenizer import KINDS
from tests.text.tiny_tokenizers import sentencepiece_metadata, tokenizer_of

EMOJI = "Repeat: 🫠🥹龜 👨‍👩‍👧‍👦 🇫🇷 你好。"
TOKENIZERS = {
    name: TextTokenizer.from_json(KINDS[name])
    for name in ("byte level", "sentencepiece", "sentencepiece without prefix", "space decoder")
}


def _stream(tokenizer: TextTokenizer, ids: list[int], cuts: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[start:end]) for start, end in pairwise(places)]
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(ids=st.lists(st.integers(0, 300), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=20), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_split_gives_the_text_of_the_whole(name: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "space decoder":  # bytes that are no text are outside what such a decoder is for
        ids = [token_id for token_id in ids if not 3 <= token_id < 259]
    assert "".join(_stream(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 60), max_size=60))
@settings(max_examples=100, deadline=None)
def test_utf_01_utf_04_text_comes_back_and_no_delta_is_half_a_character(
    default_tokenizer: TextTokenizer, text: str, cuts: list[int]
) -> None:
    ids = default_tokenizer.encode(text)
    whole = default_tokenizer.decode(ids, skip_special_tokens=False)  # a few rare bytes are not in this vocabulary
    deltas = _stream(default_tokenizer, ids, cuts, skip=False)
    assert "".join(deltas) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in delta for delta in deltas)


def test_utf_01_token_by_token_and_ascii_is_not_delayed(default_tokenizer: TextTokenizer) -> None:
    ids = default_tokenizer.encode(EMOJI)
    deltas = _stream(default_tokenizer, ids, list(range(len(ids))))
    assert "".join(deltas) == EMOJI
    assert not any("\ufffd" in delta for delta in deltas)
    ascii_ids = default_tokenizer.encode("Repeat:")
    detokenizer = IncrementalDetokenizer(default_tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ascii_ids] == ["Repeat", ":"]


def test_utf_02_cut_inside_a_character_leaves_it_out_in_stream_and_whole(default_tokenizer: TextTokenizer) -> None:
    ids = default_tokenizer.encode("ab🫠🥹龜")
    for length in range(len(ids) + 1):
        part = ids[:length]
        streamed = "".join(_stream(default_tokenizer, part, list(range(length))))
        assert streamed == default_tokenizer.decode(part)
        assert "\ufffd" not in streamed
        assert "ab🫠🥹龜".startswith(streamed)


def test_utf_05_leading_space_rules(byte_level: TextTokenizer, sentencepiece: TextTokenizer) -> None:
    hello = sentencepiece.encode("hello world", add_special_tokens=False)
    one_by_one = IncrementalDetokenizer(sentencepiece)
    assert [one_by_one.push([token_id]) for token_id in hello] == ["hello", " world"]
    assert "".join(_stream(sentencepiece, hello, [])) == "hello world"
    continued = IncrementalDetokenizer(sentencepiece, continues_text=True)
    assert "".join(continued.push([token_id]) for token_id in hello) == " hello world"
    unprefixed = tokenizer_of(sentencepiece_metadata(add_space_prefix=False))
    assert "".join(_stream(unprefixed, hello, [])) == " hello world"
    spaced = byte_level.encode(" hello")
    assert "".join(_stream(byte_level, spaced, [])) == " hello"


def test_continued_text_for_a_decoder_of_another_kind() -> None:
    tokenizer = TOKENIZERS["space decoder"]
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, continues_text=True)
    assert "".join(detokenizer.push([token_id]) for token_id in ids) == " hello world"


def test_bytes_that_are_no_text_show_as_replacement_once_that_is_certain(byte_level: TextTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    lead = byte_level.encode("🫠")[0]
    assert detokenizer.push([lead]) == ""
    assert detokenizer.push(byte_level.encode("a")) == "\ufffda"
    assert detokenizer.finish() == ""


def test_special_tokens_shown_or_hidden() -> None:
    files = build_tokenizer(sentencepiece_metadata())
    tokenizer = TextTokenizer.from_json(files.tokenizer_json)
    ids = tokenizer.encode("<|user|>hello</s>")
    assert IncrementalDetokenizer(tokenizer).push(ids) == "hello"
    assert IncrementalDetokenizer(tokenizer, skip_special_tokens=False).push(ids) == "<|user|> hello</s>"
