"""Structured logs to stderr: JSON, or lines for people on a terminal.

Owns: how a log line looks and what never stands in one; the one home of structlog. Runs in: every process.
Must not know: who logs. Prompts, generated text and token ids are kept out by the name of their field and by type.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from headrace.protocol.errors import ConfigurationError

LogFormat = Literal["auto", "json", "human"]
FORMATS = ("auto", "json", "human")
LEVELS = ("debug", "info", "warning", "error", "critical")

WITHHELD_FIELDS = frozenset(
    {
        *("prompt", "prompts", "messages", "content", "contents", "text", "texts", "delta", "input", "inputs", "output"),
        *("prompt_token_ids", "token_ids", "tokens", "suffix", "stop", "stop_strings", "body", "tools", "arguments"),
    }
)
WITHHELD = "[withheld]"
_MAX_TEXT_CHARACTERS = 2000
_MAX_TRACEBACK_CHARACTERS = 20_000
_MAX_ITEMS = 50
_MAX_DEPTH = 4


def configure_logging(format: LogFormat = "auto", level: str = "info") -> None:  # noqa: A002 - as the option is called
    """Set up this process's logs, those of libraries that use `logging` included. May be called again.

    "auto" is "human" when stderr is a terminal, else "json". Raises ConfigurationError for an unknown format or level.
    """
    if format not in FORMATS:
        raise ConfigurationError(f"Log format {format!r} is unknown; there are {', '.join(FORMATS)}.")
    number = _number_of(level)
    is_human = format == "human" or (format == "auto" and sys.stderr.isatty())
    _configure(_Form(is_human, number, with_libraries=True))


def set_level(level: str) -> None:
    """Show lines from this level up from now on, in the form that was configured; of libraries never those below info.

    Loggers that were made before follow. Raises ConfigurationError for an unknown level.
    """
    _configure(replace(_form, level=_number_of(level)))


def current_level() -> str:
    """The least level that is shown: one of LEVELS."""
    return logging.getLevelName(_form.level).lower()


def get_logger(component: str) -> FilteringBoundLogger:
    """A logger whose lines name the part of the program. Can be made before configure_logging; it follows it.

    Lines before configure_logging are for people, and withhold content as well.
    """
    return cast("FilteringBoundLogger", structlog.get_logger(component=component))


@dataclass(frozen=True, slots=True)
class _Form:
    """How this process logs."""

    is_human: bool
    level: int  # as in `logging`
    with_libraries: bool


def _number_of(level: str) -> int:
    if level.lower() not in LEVELS:
        raise ConfigurationError(f"Log level {level!r} is unknown; there are {', '.join(LEVELS)}.")
    return logging.getLevelNamesMapping()[level.upper()]


def _configure(form: _Form) -> None:
    global _form
    _form = form
    sink = _Sink()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    last: list[Processor] = [structlog.processors.format_exc_info, withhold_content]
    if form.is_human:
        # An exception is text by now: no renderer gets at local variables, in which prompts are.
        last += [_leave_out_empty, _escape_for_terminal, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last += [structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(form.level),
        logger_factory=lambda *_: structlog.WriteLogger(cast("TextIO", sink)),
        cache_logger_on_first_use=False,
    )
    if form.with_libraries:
        _configure_libraries(sink, shared, last, form.level)


def _configure_libraries(sink: "_Sink", shared: list[Processor], last: list[Processor], level: int) -> None:
    """Give what comes through `logging` the same form."""
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _name_of_library],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.INFO))  # libraries' debug lines may hold what clients sent


class _Sink:
    """To stderr. A line that cannot be written fails nobody: the reader of a pipe may end, or a disk be full, at any time.

    What was lost is counted, and said in a line of its own when lines go out again.
    """

    def __init__(self) -> None:
        self._num_lost = 0

    def write(self, line: str) -> None:
        """A whole line with its end."""
        try:
            sys.stderr.write(line)  # whatever it is by now
            sys.stderr.flush()
        except OSError:
            self._num_lost += 1
            return
        if self._num_lost:
            num_lines, self._num_lost = self._num_lost, 0
            get_logger("logs").warning("log lines were lost", num_lines=num_lines)

    def flush(self) -> None:
        """Every line is flushed when it is written."""


def withhold_content(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: fields that carry content lose it, other values are made plain and bounded."""
    for name, value in event.items():
        if name == "exception":
            event[name] = str(value)[-_MAX_TRACEBACK_CHARACTERS:]
        else:
            event[name] = _plain_field(name, value, _MAX_DEPTH)
    return event


def _plain_field(name: Any, value: Any, depth: int) -> Any:
    """As _plain; where the name says that it is content, only a number (a count of it) stays."""
    plain = _plain(value, depth)
    return plain if name not in WITHHELD_FIELDS or plain is None or isinstance(plain, int | float) else WITHHELD


def _plain(value: Any, depth: int) -> Any:
    """Numbers, bounded text, and small containers of them. Of anything else only the type: a request has a prompt in it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | PurePath | BaseException):
        text = str(value)
        return text if len(text) <= _MAX_TEXT_CHARACTERS else text[:_MAX_TEXT_CHARACTERS] + "..."
    if depth and isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        return {str(key): _plain_field(key, item, depth - 1) for key, item in items}
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth - 1) for item in list(value)[:_MAX_ITEMS]]
    return f"<{type(value).__name__}>"


def _leave_out_empty(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """What did not happen is not worth a reader's time: fields without a value, and counts (`num_`) of nothing."""
    for name in [
        name for name, value in event.items() if value is None or value == "" or (value == 0 and name.startswith("num_"))
    ]:
        del event[name]
    return event


def _escape_for_terminal(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Control characters in values (a client may have sent them) become escapes; tracebacks keep their line ends."""
    for name, value in event.items():
        if isinstance(value, str):
            lines = value.split("\n") if name in ("exception", "stack") else [value]
            event[name] = "\n".join(
                line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
                for line in lines
            )
    return event


def _name_of_library(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.get("_record")
    if record is not None:
        event.setdefault("component", record.name)
    return event


# structlog's own default shows the local variables of a traceback.
_form = _Form(is_human=True, level=logging.INFO, with_libraries=False)
_configure(_form)
