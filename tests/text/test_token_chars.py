"""How many characters one token can stand for: the bound that turns hopeless prompts away."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.text.tokenizer import TextTokenizer


def byte_level(**changes) -> Tokenizer:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"ab": 256, "abab": 257}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "ab")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(library, name, value)
    return library


@pytest.mark.parametrize(
    ("normalizer", "bound"), [(None, 4), (normalizers.NFC(), 16), (normalizers.NFKC(), None), (normalizers.Strip(), None)]
)
def test_the_bound_is_the_longest_token(normalizer, bound) -> None:
    changes = {"normalizer": normalizer} if normalizer else {}
    tokenizer = TextTokenizer(byte_level(**changes))
    assert tokenizer.max_token_chars() == bound
    for text in ("abab" * 50, "e\u0301" * 30, " " * 40, "\u1112\u1161\u11ab" * 9):
        assert bound is None or len(text) <= bound * len(tokenizer.encode(text))


def test_a_vocabulary_without_all_bytes_has_no_bound() -> None:
    library = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    library.decoder = decoders.ByteLevel()
    assert TextTokenizer(library).max_token_chars() is None
