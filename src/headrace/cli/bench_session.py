"""One call of a `headrace bench` command: from its options to a measured report, shown and saved.

Owns: Session. Runs in: CLI. Must not know: what a study measures, how reports look.
"""

import contextlib
import datetime
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
from rich.console import Console

from headrace.cli.bench_display import Display
from headrace.cli.bench_options import command_line
from headrace.loadtest.figures import GoodputTarget
from headrace.loadtest.progress import LoadProgress
from headrace.loadtest.records import RunSettings
from headrace.loadtest.report.model import Report
from headrace.loadtest.studies.errors import ENDED_BY, StudyError
from headrace.loadtest.studies.runner import LoadRunner, calibration_for
from headrace.loadtest.studies.server_facts import ServerFacts, look_up
from headrace.protocol.extras import how_to_install

EXIT_NOTHING_COMPLETED = 1
EXIT_INTERRUPTED = 130
PIPE_COLUMNS = 140


class Session:
    """Takes the options of output and of the client out of `given`; what is left describes the run or the study."""

    def __init__(self, ctx: click.Context, given: dict[str, Any]) -> None:
        self._command_line = command_line(ctx)
        self._json: Path | None = given.pop("json_path")
        self._html: Path | None = given.pop("html_path")
        self._csv: Path | None = given.pop("csv_path")
        self._requests_csv: Path | None = given.pop("requests_csv_path")
        self._has_records = not given.pop("no_records")
        self._is_quiet: bool = given.pop("quiet")
        self._drain_seconds: float | None = given.pop("drain_seconds")
        self._opens_new_connections: bool = given.pop("new_connections")
        self.targets: tuple[GoodputTarget, ...] = given.pop("targets")
        self.display = Display(Console(stderr=True), is_quiet=self._is_quiet)
        self._check_outputs()

    def _check_outputs(self) -> None:
        """What cannot be saved in the end is said before the load, not after it."""
        paths = [path for path in (self._json, self._html, self._csv, self._requests_csv) if path is not None]
        if self._is_quiet and not paths:
            raise click.UsageError("--quiet without a file to save would do nothing")
        for path in paths:
            if not path.parent.is_dir():
                raise click.UsageError(f"{path} cannot be saved: there is no folder {path.parent}")
        if len({path.resolve() for path in paths}) < len(paths):
            raise click.UsageError("two outputs have the same file")
        for package, is_needed in (("aiohttp", True), ("matplotlib", self._html is not None)):
            if is_needed and importlib.util.find_spec(package) is None:
                raise click.ClickException(f"{package} is not installed: {how_to_install('bench')}")

    def server(self, url: str, *, model: str | None, key: str | None, api: str) -> ServerFacts:
        """Ask the server who it is. ClickException, in a clear line, when the load could not work."""
        with readable_errors():
            return look_up(url, model=model, key=key, api=api)

    def runner(
        self,
        facts: ServerFacts,
        settings: RunSettings,
        *,
        key: str | None,
        max_outstanding: int | None = None,
        ends_on_interrupt: bool = True,
    ) -> LoadRunner:
        """What studies measure this server with."""
        return LoadRunner(
            facts,
            key=key,
            calibration=calibration_for(facts, settings, key),
            opens_new_connections=self._opens_new_connections,
            max_outstanding=max_outstanding,
            drain_seconds=self._drain_seconds,
            ends_on_interrupt=ends_on_interrupt,
            watching=self._watching,
        )

    @contextlib.contextmanager
    def _watching(self, label: str) -> Iterator[Callable[[LoadProgress], None] | None]:
        with self.display.measuring(label):
            yield None if self._is_quiet else self.display.update

    def finish(self, study: Callable[[], Report]) -> NoReturn:
        """Make the report, show and save it, and exit: 0, or 1 when no request completed or an error ended it early."""
        try:
            with readable_errors():
                report = study()
        except KeyboardInterrupt:
            self.display.say("Interrupted before anything was measured.")
            sys.exit(EXIT_INTERRUPTED)
        report = msgspec.structs.replace(
            report,
            command_line=self._command_line,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        if not self._is_quiet:
            from headrace.loadtest.report.terminal import print_report

            print_report(report, _wide_console())
        faults = self._save(report)
        for fault in faults:
            click.echo(f"Error: {fault}", err=True)
        if not any(result.requests.completed for result in report.results()):
            click.echo("Error: no request completed.", err=True)
            sys.exit(EXIT_NOTHING_COMPLETED)
        sys.exit(1 if faults or report.figures.get(ENDED_BY) == "error" else 0)

    def _save(self, report: Report) -> list[str]:
        """Save what was asked for; what could not be saved, a line each. One failure leaves the others."""
        from headrace.loadtest.report.files import ReportFileError, save_csv, save_json, save_requests_csv
        from headrace.loadtest.report.html import save_html
        from headrace.loadtest.report.svg import ChartsUnavailableError

        faults = []

        def save(path: Path | None, write: Callable[[Path], None]) -> None:
            if path is None:
                return
            try:
                write(path)
                self.display.say(f"Saved {path}")
            except (ReportFileError, ChartsUnavailableError) as error:
                faults.append(str(error))

        save(self._json, lambda path: save_json(report, path, with_records=self._has_records))
        save(self._csv, lambda path: save_csv(report, path))
        save(self._requests_csv, lambda path: save_requests_csv(report, path))
        save(self._html, lambda path: save_html(report, path))
        return faults


def _wide_console() -> Console:
    """Standard output; a file or a pipe has room for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """A study's own errors, and settings that make no sense, as one line and exit code 1."""
    try:
        yield
    except (StudyError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def with_defaults(settings: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """`settings` with these where they hold None."""
    return dict(settings) | {name: value for name, value in defaults.items() if settings.get(name) is None}
