"""Text to token ids and back, from a tokenizer.json.

Owns: the tokenizers library. Runs in: gateway, any thread. Must not know: requests, templates, rings.

Control markers (special tokens) are found here and not by the library, which is told to see them as plain text. So one
instance, never changed after loading, serves both ways of reading a text (markers parsed or not) and any number of threads.
"""

import codecs
import functools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from headrace.protocol.errors import ModelError, RequestError
from headrace.text.marker_guard import MarkerGuard

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_WORD_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"})
_WHITE_SPACE = re.compile(r"\s*")

# What a token adds to a text: a string where its bytes are whole characters, else the bytes.
Piece = str | bytes


class TextTokenizer:
    """A tokenizer.json behind the port `Tokenizer`. Safe to call from several threads at once."""

    def __init__(self, library: tokenizers.Tokenizer, *, bos_token_id: int | None = None, add_bos_token: bool = False) -> None:
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # markers are plain text to the library
        self._library = library
        self._leading_mark = _take_over_leading_mark(library)
        self._vocab_size = _true_vocab_size(library)
        added = library.get_added_tokens_decoder()
        plain = [token.content for token in added.values() if token.content and not token.special]
        self._unmarked = (" ", self._leading_mark or " ", *plain)  # texts that begin with one of these get no mark
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self._strips = {
            token.content: (token.lstrip, token.rstrip)
            for token in added.values()
            if token.special and (token.lstrip or token.rstrip)
        }
        self._single_words = frozenset(token.content for token in added.values() if token.special and token.single_word)
        self._markers = _marker_pattern([token for token in added.values() if token.content])
        self._prefix, self._suffix = _surroundings(library, bos_token_id, add_bos_token)
        decoding = _Decoding.of(library)
        self.num_dropped_spaces = decoding.num_dropped_spaces if decoding else 0
        self._pieces = _Pieces(library, decoding, self._vocab_size, hidden=frozenset()) if decoding else None
        hidden = frozenset(self.special_tokens.values())
        self._text_pieces = _Pieces(library, decoding, self._vocab_size, hidden=hidden) if decoding else None

    @classmethod
    def from_file(cls, path: Path, *, bos_token_id: int | None = None, add_bos_token: bool = False) -> "TextTokenizer":
        """Load a tokenizer.json. `add_bos_token` decides about BOS, whatever the file's post-processor does.

        Raises ModelError when the file cannot be read.
        """
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise ModelError(f"The tokenizer {path} cannot be read: {error}") from error
        return cls(library, bos_token_id=bos_token_id, add_bos_token=add_bos_token)

    @classmethod
    def from_json(cls, text: str, *, bos_token_id: int | None = None, add_bos_token: bool = False) -> "TextTokenizer":
        """As from_file, from the text of a tokenizer.json."""
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # see from_file
            raise ModelError(f"The tokenizer cannot be read: {error}") from error
        return cls(library, bos_token_id=bos_token_id, add_bos_token=add_bos_token)

    @property
    def vocab_size(self) -> int:
        """The true vocabulary: ids at or above it name no token."""
        return self._vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. `parse_special`: whether markers like <|im_end|> in the text become control tokens.

        `add_special_tokens` puts BOS (and what else the model wants around a text) there, BOS never twice.
        Raises RequestError for text that is not Unicode (lone surrogates).
        """
        parts: list[str | int] = self.split_markers(text) if parse_special else [text]
        ids = self.encode_parts(parts)
        if add_special_tokens:
            ids = self.with_prefix(ids)
            ids.extend(self._suffix)
        return ids

    def split_markers(self, text: str) -> list[str | int]:
        """The text cut at control markers: plain stretches as strings, markers as their ids. No stretch is empty."""
        if self._markers is None:
            return [text] if text else []
        parts: list[str | int] = []
        start = 0
        for match in self._markers.finditer(text):
            token_id = self.special_tokens.get(match.group())
            if token_id is None or match.start() < start:
                continue  # a longer plain token around a marker's text; or white space that the marker before has swallowed
            if match.group() in self._single_words and _touches_word(text, match.start(), match.end()):
                continue
            stretch = text[start : match.start()]
            start = match.end()
            if match.group() in self._strips:
                takes_before, takes_after = self._strips[match.group()]
                stretch = stretch.rstrip() if takes_before else stretch
                space = _WHITE_SPACE.match(text, start) if takes_after else None
                start = space.end() if space else start
            if stretch:
                parts.append(stretch)
            parts.append(token_id)
        if start < len(text):
            parts.append(text[start:])
        return parts

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of stretches of plain text (encoded with no marker parsed) and of ids, in order. Nothing is added."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            if not part:
                continue
            text = part
            if index == 0 and self._leading_mark and not text.startswith(self._unmarked):
                text = self._leading_mark + text
            try:
                # Not `encode`, which keeps the interpreter's lock: all other threads would wait for a long text.
                ids.extend(self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            except TypeError as error:  # what the library says of text that has no UTF-8
                raise RequestError("The text holds half a surrogate pair, which is not a character.") from error
        return ids

    def with_prefix(self, token_ids: list[int]) -> list[int]:
        """The ids with BOS (and what else the model wants first) before them, unless they begin with it already."""
        if not self._prefix or token_ids[:1] == self._prefix[:1]:
            return token_ids
        return [*self._prefix, *token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids taken as a whole. A character cut off at the end is left out; other faulty bytes give U+FFFD."""
        pieces = self.pieces(skip_special_tokens=skip_special_tokens)
        if pieces is None:
            known = [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]
            return self._library.decode(known, skip_special_tokens=skip_special_tokens).rstrip(_REPLACEMENT)
        return drop_leading_spaces(join_pieces([pieces[token_id] for token_id in token_ids]), self.num_dropped_spaces)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text (b"" for control tokens); concatenated, they are the text in UTF-8.

        For a decoder that is no concatenation, they are what the token adds to a text that ends in another token.
        """
        if self._text_pieces is None:
            return self._bytes_after_anchor(token_id)
        piece = self._text_pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def max_token_chars(self) -> int | None:
        """Most characters of a text that one token can stand for; None where nothing bounds it.

        It is known of byte-level vocabularies with all bytes, whose texts are not changed before: NFC may make one character of
        four at most (Unicode's longest canonical decomposition).
        """
        normalizer = _state(self._library.normalizer).get("type")
        vocabulary = self._library.get_vocab()
        is_byte_level = _state(self._library.decoder).get("type") == "ByteLevel"
        if not is_byte_level or self._strips or normalizer not in (None, "NFC") or not vocabulary.keys() >= _BYTE_OF.keys():
            return None
        return max(map(len, vocabulary)) * (4 if normalizer else 1)

    def token_text(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary (byte-level tokens in their alphabet); None when there is no such id."""
        return self._library.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None

    def pieces(self, *, skip_special_tokens: bool) -> Mapping[int, Piece] | None:
        """What each id adds to a text; ids that name no token add "". None where texts are not concatenations of pieces.

        The text of a sequence is the concatenation without its first `num_dropped_spaces` leading spaces.
        """
        return self._text_pieces if skip_special_tokens else self._pieces

    @functools.cached_property
    def marker_guard(self) -> MarkerGuard:
        """What keeps a user's words from becoming this tokenizer's control tokens."""
        return MarkerGuard(self.special_tokens)

    @functools.cached_property
    def anchor_token_id(self) -> int:
        """Some token with a text: what another token adds to a text is seen behind it."""
        special = frozenset(self.special_tokens.values())
        ordinary = (i for i in range(self._vocab_size) if i not in special)
        return next((i for i in ordinary if self._library.decode([i]).strip(f" {_REPLACEMENT}")), 0)

    def _bytes_after_anchor(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._vocab_size:
            return b""
        before = self._library.decode([self.anchor_token_id])
        return self._library.decode([self.anchor_token_id, token_id]).removeprefix(before).encode()


def join_pieces(pieces: Iterable[Piece]) -> str:
    """Their text. A character that is cut off at the end is left out; other faulty bytes give U+FFFD."""
    pieces = list(pieces)
    try:
        return "".join(pieces)  # type: ignore[arg-type]  # mostly all are strings
    except TypeError:
        data = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def drop_leading_spaces(text: str, at_most: int) -> str:
    """The text without that many of its leading spaces, as a SentencePiece decoder drops the one it had put there."""
    while at_most and text.startswith(" "):
        text, at_most = text[1:], at_most - 1
    return text


def _true_vocab_size(library: tokenizers.Tokenizer) -> int:
    """One more than the highest id in use: ids may have gaps, so the number of tokens does not say it."""
    missing = library.get_vocab_size(with_added_tokens=True)
    limit = 2 * missing + 4096
    token_id = 0
    while missing and token_id < limit:
        missing -= library.id_to_token(token_id) is not None
        token_id += 1
    if missing:
        raise ModelError("The tokenizer's ids have gaps of thousands: it cannot belong to a language model.")
    return token_id


def _marker_pattern(added: Sequence[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Finds special tokens, leftmost first and the longest there; also plain added tokens that hold one, which win over it."""
    special = [token for token in added if token.special]
    holding = [token for token in added if not token.special and any(s.content in token.content for s in special)]
    if not special:
        return None
    ordered = sorted([*special, *holding], key=lambda token: -len(token.content))
    return re.compile("|".join(re.escape(token.content) for token in ordered))


def _touches_word(text: str, start: int, end: int) -> bool:
    """Whether a word goes on before `start` or after `end`. Words are what they are to the library."""
    beside = text[max(start - 1, 0) : start] + text[end : end + 1]
    return any(c in ("\u200c", "\u200d") or unicodedata.category(c) in _WORD_CATEGORIES for c in beside)


def _surroundings(library: tokenizers.Tokenizer, bos_token_id: int | None, add_bos_token: bool) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text, with BOS by the flag alone."""
    plain = library.encode("a", add_special_tokens=False).ids
    full = library.encode("a", add_special_tokens=True).ids
    begin = next((i for i in range(len(full) + 1) if full[i : i + len(plain)] == plain), None)
    if begin is None:
        raise ModelError("The tokenizer's post-processor changes the text's own ids, which is not supported.")
    prefix = [token_id for token_id in full[:begin] if token_id != bos_token_id]
    if add_bos_token and bos_token_id is not None:
        prefix.insert(0, bos_token_id)
    return prefix, full[begin + len(plain) :]


def _state(component: Any) -> dict[str, Any]:
    """A component of the library as the JSON object that describes it; {} for None."""
    return dict(json.loads(component.__getstate__())) if component is not None else {}


def _take_over_leading_mark(library: tokenizers.Tokenizer) -> str | None:
    """The mark that goes before the first stretch of a text only, if the pre-tokenizer has such a rule, which is switched off.

    The library sees each stretch between markers as a text of its own and would put the mark before each of them.
    """
    state = _state(library.pre_tokenizer)
    found = None
    for stage in [state, *state.get("pretokenizers", ())]:
        if stage.get("type") == "Metaspace" and stage.get("prepend_scheme") == "first":
            stage["prepend_scheme"] = "never"
            found = str(stage["replacement"])
    if found:
        changed = library.pre_tokenizer
        changed.__setstate__(json.dumps(state).encode())
        library.pre_tokenizer = changed
    return found


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 and on (GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class _Decoding:
    """How one token's text becomes bytes, for decoders that are a concatenation."""

    def __init__(
        self, *, is_byte_level: bool, mark: str = "", has_byte_tokens: bool = False, num_dropped_spaces: int = 0
    ) -> None:
        self.num_dropped_spaces = num_dropped_spaces
        self._is_byte_level = is_byte_level
        self._mark = mark
        self._has_byte_tokens = has_byte_tokens

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> "_Decoding | None":
        """Of the library's decoder; None when it is of another kind than byte-level or SentencePiece."""
        state = _state(library.decoder)
        stages = state.get("decoders", [state])
        kinds = [stage.get("type") for stage in stages]
        if kinds == ["ByteLevel"]:
            return cls(is_byte_level=True)
        if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            strip: dict[str, Any] = stages[3] if len(stages) == 4 else {"content": " ", "start": 0, "stop": 0}
            replaces = stages[0].get("pattern", {}).get("String")
            if stages[0].get("content") == " " and replaces and strip["content"] == " " and not strip["stop"]:
                return cls(is_byte_level=False, mark=replaces, has_byte_tokens=True, num_dropped_spaces=int(strip["start"]))
        return None

    def piece(self, token: str) -> Piece:
        """What the token adds to a text."""
        if self._is_byte_level:
            try:
                data = bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                return token  # an added token with characters of its own
        else:
            byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
            if byte is None:
                return token.replace(self._mark, " ")
            data = bytes([int(byte[1], 16)])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class _Pieces(dict[int, Piece]):
    """Token id -> piece, worked out at the first use of each; bounded by the vocabulary."""

    def __init__(self, library: tokenizers.Tokenizer, decoding: _Decoding, vocab_size: int, *, hidden: frozenset[int]) -> None:
        super().__init__()
        self._library = library
        self._decoding = decoding
        self._vocab_size = vocab_size
        self._hidden = hidden

    def __missing__(self, token_id: int) -> Piece:
        if not 0 <= token_id < self._vocab_size:
            return ""
        token = None if token_id in self._hidden else self._library.id_to_token(token_id)
        piece = self._decoding.piece(token) if token is not None else ""
        self[token_id] = piece
        return piece
