"""`headrace top`: a live view of a running server.

Owns: the command's flags and exit codes. Runs in: CLI. Must not know: HTTP, metrics.
"""

import io
import json
import sys

import click
import msgspec
from rich.console import Console

from headrace.cli.numbers import NumberRange
from headrace.monitor.client import Client
from headrace.monitor.model import Frame, Status
from headrace.monitor.render import History, draw
from headrace.monitor.watch import look_twice, watch

EXAMPLES = """
\b
Examples:
  headrace top
  headrace top --url http://10.0.0.7:8000 --interval 5
  HEADRACE_ADMIN_TOKEN=... headrace top --url https://models.example.com
  headrace top --once
  headrace top --once --json | jq .throughput.output_tokens_per_second
"""
PLAIN_WIDTH = 100  # of text that goes to no terminal


@click.command(epilog=EXAMPLES)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option(
    "--interval",
    type=NumberRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks. Rates and percentiles are those of this time.",
)
@click.option("--once", is_flag=True, help="Print one frame, made of two looks one interval apart, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: as JSON, with stable keys.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Most requests that are listed.")
@click.option(
    "--admin-token",
    default="",
    envvar="HEADRACE_ADMIN_TOKEN",
    help="The server's token, which the list of requests may need; better in HEADRACE_ADMIN_TOKEN, where other users of this "
    "machine cannot see it.",
)
def top(url: str, interval: float, once: bool, as_json: bool, limit: int, admin_token: str) -> None:
    """Show what a running server does: throughput, latencies, batch, cache, stalls and the slowest requests.

    It reads /metrics, /health/ready and /debug/requests. The live view ends with q or Ctrl-C; it goes on when the server dies
    and comes back. --once ends with 1 when there is no server, or none of ours, at the address.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once.")
    try:
        client = Client(url, admin_token)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url or --admin-token") from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the bars' characters shows question marks
    console = Console()
    try:
        if once:
            _print_once(look_twice(client, interval, limit), console, as_json)
        elif not sys.stdout.isatty() or console.is_dumb_terminal:
            raise click.UsageError("The live view needs a terminal that can move its cursor; --once prints one frame.")
        else:
            watch(client, console, interval, limit)
    finally:
        client.close()


def _print_once(frame: Frame, console: Console, as_json: bool) -> None:
    if frame.server.status is Status.UNREACHABLE:
        raise click.ClickException(f"{frame.server.url} cannot be reached: {frame.server.reason}")
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(frame), indent=1))  # ASCII only: nothing in it can move a cursor
    else:
        width = console.width if sys.stdout.isatty() else PLAIN_WIDTH
        console.print(draw(frame, History(), width), soft_wrap=True)
    if frame.metrics_error:
        raise click.ClickException(f"No numbers: {frame.metrics_error}")
