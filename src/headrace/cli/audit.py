"""`headrace audit`: check any OpenAI-compatible server.

Owns: the command's flags and files. Runs in: CLI. Must not know: any check.
"""

import asyncio
import pathlib
import sys

import click
import msgspec
from rich.console import Console

from headrace.cli.numbers import NumberRange
from headrace.loadtest.audit.discovery import AuditError
from headrace.loadtest.audit.findings import AuditReport
from headrace.loadtest.audit.html_page import render_report
from headrace.loadtest.audit.http2 import Http2Client
from headrace.loadtest.audit.raw_client import RawClient
from headrace.loadtest.audit.runner import run_audit
from headrace.loadtest.audit.session import Session
from headrace.loadtest.audit.terminal import print_report
from headrace.loadtest.audit.wire import MonotonicClock, Target

EXAMPLES = """
\b
Examples:
  headrace audit http://127.0.0.1:8000
  headrace audit https://models.example.com/v1 --model qwen --key sk-... --json audit.json --html audit.html
  headrace audit http://127.0.0.1:8000 --quick --fail-under 90
"""


@click.command(epilog=EXAMPLES)
@click.argument("url")
@click.option("--model", default="", help="Model to ask.  [default: the first of /v1/models]")
@click.option("--key", default="", envvar="HEADRACE_AUDIT_KEY", help="Bearer key. It is sent to URL only and never saved.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Save the report as JSON.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=pathlib.Path), help="Save it as a page.")
@click.option("--max-requests", type=click.IntRange(min=10), default=300, show_default=True, help="Never send more than these.")
@click.option("--timeout", type=NumberRange(min=1), default=60.0, show_default=True, help="Seconds, of each request.")
@click.option("--quick", is_flag=True, help="Smaller bursts, and no storm of disconnects.")
@click.option("--fail-under", type=NumberRange(0, 100), help="Exit with 2 when the score is below this.")
def audit(
    url: str,
    model: str,
    key: str,
    json_file: pathlib.Path | None,
    html_file: pathlib.Path | None,
    max_requests: int,
    timeout: float,
    quick: bool,
    fail_under: float | None,
) -> None:
    """Check the server at URL against what an application will meet, with evidence and a hint for each line.

    Bounded and harmless: at most --max-requests requests, each with a time-out, to that server only. Each line is pass, fail or
    skip; the score is the share of weight passed, a clear refusal of an optional field counts half.
    """
    try:
        target = Target.parse(url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="URL") from None
    console = Console()
    try:
        report = asyncio.run(_audit(target, console, model, key, max_requests, timeout, quick))
    except AuditError as error:
        raise click.ClickException(str(error)) from None
    print_report(report, console)
    try:
        if json_file is not None:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
        if html_file is not None:
            html_file.write_text(render_report(report), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"The report could not be saved: {error}") from None
    if fail_under is not None and (report.score is None or report.score < fail_under):
        sys.exit(2)


async def _audit(
    target: Target, console: Console, model: str, key: str, max_requests: int, timeout: float, quick: bool
) -> AuditReport:
    clock = MonotonicClock()
    client = RawClient(target, clock)
    session = Session(
        client,
        clock,
        model=model,
        key=key,
        max_requests=max_requests,
        timeout_seconds=timeout,
        is_quick=quick,
        http2_probe=Http2Client(target).probe,
    )
    try:
        with console.status("Asking the server ...") as status:

            def on_progress(number: int, count: int, title: str) -> None:
                status.update(f"{number + 1} of {count}: {title}")

            return await run_audit(session, target.url, on_progress=on_progress)
    finally:
        await client.aclose()
