"""Log lines: their form, and that no prompt gets into one by any way."""

import dataclasses
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import structlog

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.telemetry import logs
from headrace.telemetry.logs import configure_logging, current_level, get_logger, set_level

SECRET = "the quick brown secret"


class Stderr:
    """What was written to stderr so far."""

    def __init__(self, capsys):
        self._capsys = capsys
        self._written = ""

    def getvalue(self):
        self._written += self._capsys.readouterr().err
        return self._written


@pytest.fixture
def stderr(capsys):
    """The process's logging is put back afterwards."""
    root = logging.getLogger()
    handlers, level, before, form = root.handlers[:], root.level, structlog.get_config(), logs._form
    yield Stderr(capsys)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)
    logs._form = form


def test_json_lines(stderr):
    log = get_logger("gateway")  # made before the set-up, as modules do
    configure_logging("json", "info")
    log.info("listening", port=8000, ratio=0.5, path=Path("/x"), names=("a", "b"), nothing=None)
    log.debug("too fine")
    (line,) = stderr.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {
        "event": "listening",
        "component": "gateway",
        "level": "info",
        "port": 8000,
        "ratio": 0.5,
        "path": "/x",
        "names": ["a", "b"],
        "nothing": None,
    }


def test_auto_follows_the_terminal(stderr, monkeypatch):
    configure_logging("auto", "info")
    get_logger("x").info("one")
    assert json.loads(stderr.getvalue())["event"] == "one"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    configure_logging("auto", "info")
    get_logger("x").info("two")
    line = stderr.getvalue().splitlines()[1]
    assert "two" in line
    assert not line.startswith("{")


def test_levels_are_obeyed_and_unknown_words_refused(stderr):
    configure_logging("json", "ERROR")
    get_logger("x").warning("no")
    logging.getLogger("library").warning("no")
    assert stderr.getvalue() == ""
    for arguments in (("xml", "info"), ("json", "loud")):
        with pytest.raises(ConfigurationError, match="unknown; there are"):
            configure_logging(*arguments)


def test_lines_of_libraries_look_the_same(stderr):
    configure_logging("json", "debug")
    logging.getLogger("some.library").warning("disk %s", "full")
    logging.getLogger("some.library").debug("what a client sent")
    (line,) = stderr.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["component"], entry["level"]) == ("disk full", "some.library", "warning")


def request():
    return GenerationRequest(1, SECRET, 0, [424242], SamplingParams(), StopConditions(5), 0, 0, "", 0, "m")


@pytest.mark.parametrize("form", ["json", "human"])
def test_prompts_stay_out(stderr, form):
    configure_logging(form, "info")
    log = get_logger("gateway")
    log.info("a", prompt=SECRET, messages=[{"role": "user", "content": SECRET}], token_ids=[424242], num_tokens=7)
    log.info("b", request=request(), details={"text": SECRET, "deep": {"content": SECRET}}, raw=SECRET.encode())
    log.info("c", nested=[[[[[[SECRET]]]]]])

    def fails(prompt):
        raise ValueError("broken")

    try:
        fails(SECRET)
    except ValueError:
        log.exception("d", request=request())
        logging.getLogger("library").exception("e")
    written = stderr.getvalue()
    assert "secret" not in written
    assert "424242" not in written
    assert written.count("ValueError: broken") == 2
    assert "[withheld]" in written
    assert "<GenerationRequest>" in written
    assert "7" in written


def test_values_are_bounded(stderr):
    configure_logging("json", "info")
    get_logger("x").info("y", reason="x" * 100_000, many=list(range(10_000)), table={str(n): n for n in range(10_000)})
    assert len(stderr.getvalue()) < 5_000


@pytest.mark.parametrize("form", ["json", "human"])
def test_a_client_cannot_forge_lines_or_paint_the_terminal(stderr, form):
    configure_logging(form, "info")
    get_logger("x").info("y", name="a\nlevel=error forged\x1b[31m\udcff")
    (line,) = stderr.getvalue().splitlines()
    assert "\x1b[31m" not in line
    assert "forged" in line


def test_before_the_set_up_no_local_variables_are_shown(stderr):
    def fails(prompt):
        raise ValueError("broken")

    try:
        fails(SECRET)
    except ValueError:
        get_logger("x").exception("early", prompt=SECRET)
    written = stderr.getvalue()
    assert "ValueError: broken" in written
    assert "secret" not in written


def test_the_level_changes_at_run_time_for_loggers_made_before_and_for_libraries(stderr):
    log, library = get_logger("gateway"), logging.getLogger("some.library")
    configure_logging("json", "info")
    assert current_level() == "info"
    set_level("DEBUG")
    assert current_level() == "debug"
    log.debug("ours at debug")
    library.debug("a library at debug, in which prompts may be")
    set_level("error")
    log.warning("ours at warning")
    library.warning("a library at warning")
    library.error("a library at error")
    set_level("info")
    log.info("ours at info")
    library.info("a library at info")
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["ours at debug", "a library at error", "ours at info", "a library at info"]
    assert all("timestamp" in line for line in lines), "the form stays"


class Pipe(io.StringIO):
    """Whose reader may be gone."""

    is_broken = False

    def write(self, text):
        if self.is_broken:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("form", ["json", "human"])
def test_a_line_that_cannot_be_written_fails_nobody_and_is_counted(form, stderr, monkeypatch):
    """The reader of a pipe ends, a disk is full: whoever logs goes on, and what was lost is said when lines go out again."""
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    configure_logging(form)
    log, library = get_logger("test"), logging.getLogger("library")
    log.info("first line")
    pipe.is_broken = True
    log.info("line lost")
    library.warning("line lost")
    pipe.is_broken = False
    library.warning("second line")
    log.info("third line")
    lines = pipe.getvalue().splitlines()
    assert "line lost" not in pipe.getvalue()
    events = ["first line", "second line", "log lines were lost", "third line"]
    assert [next(event for event in events if event in line) for line in lines] == events
    assert re.search(r"num_lines\W+2\b", re.sub(r"\x1b\[[0-9;]*m", "", lines[2]))


def test_an_unknown_level_changes_nothing(stderr):
    configure_logging("json", "warning")
    with pytest.raises(ConfigurationError, match="loud"):
        set_level("loud")
    assert current_level() == "warning"


def test_set_level_does_not_take_over_libraries_before_logging_is_configured(stderr, monkeypatch):
    """As in a program that only uses a part of this one."""
    monkeypatch.setattr(logs, "_form", dataclasses.replace(logs._form, with_libraries=False))
    handlers = logging.getLogger().handlers[:]
    set_level("debug")
    assert logging.getLogger().handlers == handlers
