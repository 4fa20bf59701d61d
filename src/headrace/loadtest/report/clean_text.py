"""Text that may come from a server, made harmless for terminals, pages and files.

Owns: plain, valid_text. Runs in: load tool. Must not know: where text is shown.
"""

import unicodedata

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def plain(text: str) -> str:
    """Control characters, direction overrides and lone surrogates replaced; line feeds and tabs become spaces."""
    return "".join(
        " " if char in "\n\t" else _REPLACEMENT if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char for char in text
    )


def valid_text(text: str) -> str:
    """Lone surrogates (a server may send them as JSON escapes) have no UTF-8 form: a question mark stands for each."""
    return text.encode("utf-8", "replace").decode("utf-8")
