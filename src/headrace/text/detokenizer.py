"""Token ids -> text, piece by piece.

Owns: the text of one sequence while it grows. Runs in: gateway. Must not know: rings, requests, stop strings.
"""

import codecs
from collections.abc import Sequence

from headrace.text.tokenizer import TextTokenizer, drop_leading_spaces

_UTF8 = codecs.getincrementaldecoder("utf-8")
_CONTEXT_TOKENS = 8  # that a decoder of another kind is shown before the new ones


class IncrementalDetokenizer:
    """The text of one sequence: what `push` and `finish` gave, joined, is `tokenizer.decode` of all ids, however split.

    A character split over tokens is held back until it is whole, so U+FFFD stands only for bytes that can never become one.
    A character that the last token leaves unfinished is left out, in a stream and in `decode` alike.

    `continues_text`: the ids continue a text that was shown before, so a SentencePiece model's first space is kept.
    """

    __slots__ = ("_context", "_decoder", "_is_decoding", "_num_spaces_to_drop", "_pieces", "_skips_special", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True, *, continues_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._num_spaces_to_drop = 0 if continues_text else tokenizer.num_dropped_spaces
        self._decoder: codecs.IncrementalDecoder | None = None  # made when the first split character comes
        self._is_decoding = False  # the decoder holds the first bytes of a character
        # For decoders of another kind: the last few tokens whose text is out.
        self._context = [tokenizer.anchor_token_id] if continues_text and self._pieces is None else []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; "" when there is none yet."""
        pieces = self._pieces
        if pieces is None:
            return self._push_other(token_ids)
        if len(token_ids) == 1 and not self._is_decoding:  # the common case of a stream
            piece = pieces[token_ids[0]]
            text = piece if isinstance(piece, str) else self._decode(piece)
        else:
            text = "".join([self._text_of(pieces[token_id]) for token_id in token_ids])
        if self._num_spaces_to_drop and text:
            self._num_spaces_to_drop, text = self._drop_spaces(text)
        return text

    def finish(self) -> str:
        """What is left when no more ids come: nothing, as an unfinished character is left out. Callers need not know that."""
        return ""

    def _text_of(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            if not self._is_decoding or not piece:
                return piece
            piece = piece.encode()  # what is held back is faulty: the decoder says so
        return self._decode(piece)

    def _decode(self, data: bytes) -> str:
        if self._decoder is None:
            self._decoder = _UTF8("replace")
        text = self._decoder.decode(data)
        self._is_decoding = bool(self._decoder.getstate()[0])
        return text

    def _drop_spaces(self, text: str) -> tuple[int, str]:
        rest = drop_leading_spaces(text, self._num_spaces_to_drop)
        num_dropped = len(text) - len(rest)
        return (0 if rest else self._num_spaces_to_drop - num_dropped), rest

    def _push_other(self, token_ids: Sequence[int]) -> str:
        """For decoders of another kind: what the new tokens change in the text of the last few."""
        decode = self._tokenizer.decode
        shown = decode(self._context, skip_special_tokens=self._skips_special)
        context = [*self._context, *token_ids]
        self._context = context[-_CONTEXT_TOKENS:]
        return decode(context, skip_special_tokens=self._skips_special)[len(shown) :]
