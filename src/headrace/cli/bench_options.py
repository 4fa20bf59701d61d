"""Options that the commands of `headrace bench` share, and the settings that they make.

Owns: the groups of options, BenchCommand, the checks between options. Runs in: CLI. Must not know: how loads are made.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from headrace.cli.numbers import NumberRange
from headrace.loadtest import arrivals, request_drafts
from headrace.loadtest.definitions import definitions_text
from headrace.loadtest.records import RunSettings
from headrace.loadtest.targets import DEFAULT_TARGETS, GoodputTarget, parse_target
from headrace.loadtest.workloads import WORKLOAD_FORMS

KEY_VARIABLES = ["HEADRACE_BENCH_KEY", "OPENAI_API_KEY"]
OPEN_ARRIVALS = [name for name in arrivals.ARRIVALS if name != "closed"]
DEFAULT_OPEN_SECONDS = 60.0
# Name of the option (and in RunSettings.extra) -> (flag, the arrival that reads it).
ARRIVAL_FLAGS = {
    arrivals.BURST_ON_SECONDS: ("--burst-on", "bursty"),
    arrivals.BURST_OFF_SECONDS: ("--burst-off", "bursty"),
    arrivals.BURST_OFF_SHARE: ("--burst-off-share", "bursty"),
    arrivals.RAMP_TO_RATE: ("--ramp-to", "ramp"),
    arrivals.RAMP_SECONDS: ("--ramp-seconds", "ramp"),
}
ARGUMENTS = "headrace.bench.arguments"  # in the context's meta: what the command was called with

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FILE = click.Path(dir_okay=False, path_type=Path)
READABLE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)
SECONDS = NumberRange(min=0)
ABOVE_ZERO = NumberRange(min=0, min_open=True)


class BenchCommand(click.Command):
    """Remembers what it was called with, to print how to repeat it, and ends its help with the definitions of the figures."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does."""
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, then workloads and figures."""
        super().format_epilog(ctx, formatter)
        with formatter.section("Workloads"):
            formatter.write_dl(list(WORKLOAD_FORMS.items()))
        with formatter.section("Figures"):
            for paragraph in definitions_text().split("\n\n"):
                formatter.write_text(paragraph)
                formatter.write_paragraph()


def command_line(ctx: click.Context) -> str:
    """What repeats the command; the value of --key is left out."""
    return shlex.join(["headrace", "bench", ctx.info_name or "", *without_key(ctx.meta[ARGUMENTS])])


def without_key(arguments: Sequence[str]) -> list[str]:
    """The arguments without --key and its value: it comes from the environment the next time."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
        elif argument == "--key":
            is_value = True
        elif not argument.startswith("--key="):
            kept.append(argument)
    return kept


def combined(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which --help shows them."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


URL = click.option("--url", required=True, help="Base URL of the server, with or without /v1. Nothing is sent elsewhere.")
MODEL = click.option("--model", help="Model id. Default: the only one that /v1/models names.")
KEY = click.option(
    "--key",
    envvar=KEY_VARIABLES,
    help=f"API key; better in {KEY_VARIABLES[0]} or {KEY_VARIABLES[1]}, where other users of this machine cannot see it. "
    "It is never saved.",
)
API = click.option(
    "--api", type=click.Choice(["chat", "completions"]), default="completions", show_default=True, help="Which API to load."
)
CLIENTS = click.option(
    "--clients",
    type=COUNT,
    help="Closed loop: so many clients, each waiting for its answer before it asks again. With --rate: most requests under way "
    "at once; the report warns when that was reached. Default without --rate: 8.",
)
RATE = click.option("--rate", type=ABOVE_ZERO, help="Open loop: so many requests a second, whatever is outstanding.")
STREAM = click.option("--stream/--no-stream", "is_stream", default=True, help="Ask for streams (default) or whole answers.")

ARRIVAL = combined(
    click.option(
        "--arrival",
        type=click.Choice(OPEN_ARRIVALS),
        help="How requests of an open loop are spread. Default: poisson, or trace with a trace that has times.",
    ),
    click.option("--burst-on", "burst_on_seconds", type=ABOVE_ZERO, help="bursty: mean seconds of a burst. Default: 1."),
    click.option("--burst-off", "burst_off_seconds", type=ABOVE_ZERO, help="bursty: mean seconds between bursts. Default: 4."),
    click.option(
        "--burst-off-share",
        type=NumberRange(0, 1),
        help="bursty: rate between bursts as a share of the rate in them. Default: 0.",
    ),
    click.option("--ramp-to", "ramp_to_rate", type=ABOVE_ZERO, help="ramp: rate at its end; it starts at --rate."),
    click.option("--ramp-seconds", type=ABOVE_ZERO, help="ramp: how long it takes. Default: the duration."),
)
LENGTH_OF_RUN = combined(
    click.option("--requests", "num_requests", type=COUNT, help="End after so many requests."),
    click.option("--duration", "duration_seconds", type=ABOVE_ZERO, help="Send for so many seconds; what runs then may end."),
    click.option(
        "--warm-up",
        "warm_up_seconds",
        type=SECONDS,
        default=0.0,
        help="Seconds at the start that are not measured. Default: 0.",
    ),
    click.option(
        "--cool-down",
        "cool_down_seconds",
        type=SECONDS,
        default=0.0,
        help="Seconds at the end that are not measured. Default: 0.",
    ),
    click.option(
        "--timeout", "timeout_seconds", type=ABOVE_ZERO, default=600.0, help="Seconds until a request has failed. Default: 600."
    ),
    click.option(
        "--drain",
        "drain_seconds",
        type=SECONDS,
        help="Seconds that requests may still run after the duration; later they are unfinished: misses. Default: no bound.",
    ),
)
WORKLOAD = combined(
    click.option("--workload", default="fixed", show_default=True, help="What is asked; the forms stand at the end."),
    click.option(
        "--prompt-tokens", type=COUNT, help="Tokens of each prompt, about. Default: 256 (fixed), 4096 (long-document)."
    ),
    click.option("--output-tokens", type=COUNT, help="Tokens of each answer. Default: 64 (fixed), 128 (long-document)."),
    click.option(
        "--scale",
        "length_scale",
        type=ABOVE_ZERO,
        default=1.0,
        help="Multiply the lengths of a recorded shape; the shape is kept, and the report says so. Default: 1.",
    ),
    click.option("--shared-prefix-tokens", type=click.IntRange(min=0), default=0, help="Tokens that all prompts begin with."),
    click.option(
        "--salt/--no-salt",
        "is_salted",
        default=True,
        help="New texts in each run (default), so that the server's prefix cache does not flatter; or the same ones again.",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, help="Of lengths, order and times. Default: 0."),
    click.option("--temperature", type=NumberRange(0, 2), default=0.0, help="Default: 0."),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        "ignores_eos",
        default=True,
        help="Ask for answers of exactly the wanted length (default; many servers know the field, some ignore it).",
    ),
    click.option("--think", "think_seconds", type=SECONDS, help="chat: mean seconds between an answer and the next turn."),
    click.option("--system-tokens", type=COUNT, help="chat: length of a tenant's system prompt."),
    click.option("--tenants", "num_tenants", type=COUNT, help="chat: tenants, each with a system prompt of its own."),
    click.option(
        "--questions", "questions_per_document", type=COUNT, help="long-document: questions in a row on one document."
    ),
    click.option(
        "--class-headers",
        is_flag=True,
        help="trace of a record: send each request's class (x-headrace-class), tenant (x-headrace-tenant: tenantN, by its "
        "number) and priority.",
    ),
    click.option("--repeat-prompts", "repeats_prompts", is_flag=True, help="prompts, sharegpt: begin anew at the file's end."),
)
CLIENT = combined(
    click.option(
        "--processes", "num_processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Client processes."
    ),
    click.option(
        "--new-connections",
        is_flag=True,
        help="A connection for each request. Default: kept ones, opened before the clock starts.",
    ),
)
TARGETS = click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME|TTFT:TBT",
    callback=lambda _ctx, _option, values: _targets(values),
    help="Goodput target, several times if wanted: mlperf (2000:100), mlperf-interactive (500:30), TTFT:TBT in milliseconds, "
    "or NAME=TTFT:TBT. The first one is the goodput of the report. Default: both named ones.",
)
OUTPUT = combined(
    click.option(
        "--json", "json_path", type=FILE, help="Save the report with everything needed to repeat and redraw it (.gz: packed)."
    ),
    click.option("--html", "html_path", type=FILE, help="Save one self-contained page with charts."),
    click.option("--csv", "csv_path", type=FILE, help="Save a line for each result."),
    click.option("--requests-csv", "requests_csv_path", type=FILE, help="Save a line for each request."),
    click.option(
        "--no-records", is_flag=True, help="Leave the raw records out of the JSON: small, but charts of it are coarse."
    ),
    click.option("--quiet", is_flag=True, help="No progress and no table."),
)


def _targets(values: tuple[str, ...]) -> tuple[GoodputTarget, ...]:
    try:
        targets = tuple(parse_target(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if len({target.name for target in targets}) < len(targets):
        raise click.BadParameter("two targets have the same name")
    return targets or DEFAULT_TARGETS


def arrival_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of ARRIVAL, CLIENTS and RATE out of `given`; the fields of RunSettings that they make.

    UsageError for options that the arrival would not look at: none is accepted and ignored.
    """
    arrival, rate, clients = given.pop("arrival", None), given.pop("rate", None), given.pop("clients", None)
    extra: dict[str, str] = {}
    if arrival is None and rate is not None:
        arrival = "poisson"
    for name, (flag, wanted) in ARRIVAL_FLAGS.items():
        value = given.pop(name, None)
        if value is None:
            continue
        if wanted != arrival:
            raise click.UsageError(f"{flag} is for --arrival {wanted}")
        extra[name] = f"{value:g}"
    if arrival in (None, "closed"):
        return {"arrival": "closed", "num_clients": clients or 8, "rate": None, "extra": extra}
    if rate is None and arrival != "trace":
        raise click.UsageError(f"--arrival {arrival} needs --rate")
    if arrival == "ramp" and arrivals.RAMP_TO_RATE not in extra:
        raise click.UsageError("--arrival ramp needs --ramp-to")
    return {"arrival": arrival, "num_clients": None, "rate": rate, "extra": extra}


def run_settings(given: dict[str, Any], *, url: str, model: str) -> RunSettings:
    """Take every option that describes a run out of `given`. UsageError for options that contradict each other.

    Options of a workload go to `extra`; whether the workload knows them is checked where the plan is made.
    """
    load = arrival_settings(given)
    extra: dict[str, str] = load.pop("extra")
    for name in (
        request_drafts.THINK_SECONDS,
        request_drafts.SYSTEM_TOKENS,
        request_drafts.NUM_TENANTS,
        request_drafts.QUESTIONS_PER_DOCUMENT,
    ):
        if (value := given.pop(name)) is not None:
            extra[name] = f"{value:g}"
    for name in (request_drafts.CLASS_HEADERS, request_drafts.REPEATS_PROMPTS):
        if given.pop(name):
            extra[name] = "1"
    names = (
        "num_requests", "duration_seconds", "warm_up_seconds", "cool_down_seconds", "timeout_seconds", "num_processes",
        "workload", "prompt_tokens", "output_tokens", "length_scale", "shared_prefix_tokens", "is_salted", "seed",
        "temperature", "ignores_eos", "api",
    )  # fmt: skip
    fields = {name: given.pop(name) for name in names}
    is_stream = given.pop("is_stream", True)
    if given:
        raise ValueError(f"options that nothing reads: {', '.join(given)}")
    return RunSettings(url=url, model=model, is_stream=is_stream, extra=extra, **load, **fields)


def has_own_end(settings: Mapping[str, Any]) -> bool:
    """The workload is a file, which ends the run when nothing else does."""
    return str(settings["workload"]).partition(":")[0] in ("trace", "prompts", "sharegpt")
