"""The limits and intervals of the HTTP surface.

Owns: HttpSettings. Runs in: gateway. Must not know: how a configuration is read.
"""

import msgspec

from headrace.protocol.errors import ConfigurationError


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on what one request may bring. Raises ConfigurationError for values that cannot work."""

    max_body_bytes: int = 4 * 1024 * 1024  # more is 413
    body_seconds: float = 60.0  # in which a body has to arrive: one that trickles in holds memory all the while
    max_json_depth: int = 64  # brackets inside brackets
    max_choices: int = 128  # `n`
    max_sequences: int = 512  # prompts times `n` of one request
    max_stop_strings: int = 16
    max_stop_string_chars: int = 1024
    long_text_chars: int = 8192  # longer texts are tokenized on a thread, not on the event loop
    long_text_threads: int = 2
    max_waiting_long_texts: int = 64  # more at once are refused as overload
    keep_alive_seconds: float = 15.0  # longest silence on an event stream

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be greater than 0.")
        if self.max_json_depth > 256:
            raise ConfigurationError("max_json_depth must be at most 256.")
