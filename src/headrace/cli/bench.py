"""`headrace bench`: measure any OpenAI-compatible server from outside.

Owns: the commands run, stream, sweep, compare, capacity. Runs in: CLI. Must not know: how load is made or figures computed.
What measures is imported when a command runs, so that other commands do not pay for it.
"""

from typing import TYPE_CHECKING, Any

import click
import msgspec

from headrace.cli import bench_options as options
from headrace.cli.bench_arms import ServerSpec, check_variant, parse_loads, parse_server, parse_variant
from headrace.cli.bench_report import report as report_command
from headrace.cli.numbers import NumberRange
from headrace.loadtest.records import RunSettings

if TYPE_CHECKING:
    from headrace.cli.bench_session import Session
    from headrace.loadtest.studies.alternation import Arm, Block

DEFAULT_CLIENTS = 8
DEFAULT_REQUESTS = 100
DEFAULT_BLOCK_REQUESTS = 32
DEFAULT_POINT_REQUESTS = 48
DEFAULT_RATE_SECONDS = 40.0  # long enough to see a queue grow

LOAD = options.combined(
    options.CLIENTS, options.RATE, options.ARRIVAL, options.LENGTH_OF_RUN, options.WORKLOAD, options.CLIENT, options.TARGETS
)
SERVER = options.combined(options.URL, options.MODEL, options.KEY, options.API)
ROUNDS = options.combined(
    click.option("--rounds", type=options.COUNT, default=8, show_default=True, help="Blocks of each side."),
    click.option("--keep-first", is_flag=True, help="Do not throw away a first round, which warms the servers up."),
)


@click.group()
def bench() -> None:
    """Measure any OpenAI-compatible server from outside: latencies, throughput, goodput, capacity.

    Load is sent to the URLs that are given and nowhere else.
    """


def _limits(given: dict[str, Any], num_requests: int, *, is_open: bool | None = None, seconds: float | None = None) -> None:
    """Without --requests and --duration: so many requests, in an open loop `seconds`. A file has its own end."""
    if given["num_requests"] is not None or given["duration_seconds"] is not None or options.has_own_end(given):
        return
    if (given.get("rate") is not None if is_open is None else is_open) and seconds is not None:
        given["duration_seconds"] = seconds
    else:
        given["num_requests"] = num_requests


def _one_server(session: "Session", given: dict[str, Any], *, ends_on_interrupt: bool = True) -> tuple[RunSettings, Any]:
    """The settings of a study on one server, and what it is measured with. What is left in `given` is the study's own."""
    key, clients = given.pop("key"), given.get("clients")
    facts = session.server(given.pop("url"), model=given.pop("model"), key=key, api=given["api"])
    settings = options.run_settings(given, url=facts.url, model=facts.model)
    max_outstanding = clients if settings.arrival != "closed" else None
    runner = session.runner(facts, settings, key=key, max_outstanding=max_outstanding, ends_on_interrupt=ends_on_interrupt)
    return settings, runner


@bench.command(
    cls=options.BenchCommand,
    epilog="""
\b
Examples:
  headrace bench run --url http://127.0.0.1:8000 --clients 8 --requests 200 --prompt-tokens 256 --output-tokens 64
  headrace bench run --url http://127.0.0.1:8000 --rate 4 --duration 60 --workload azure-conversation --scale 0.125
  headrace bench run --url http://127.0.0.1:8000 --workload hol --clients 8 --requests 300 --html run.html
""",
)
@SERVER
@LOAD
@options.STREAM
@options.OUTPUT
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """One load, all figures: closed loop with --clients, open loop with --rate."""
    from headrace.cli.bench_session import Session
    from headrace.loadtest.studies.single import run_single

    session = Session(ctx, given)
    _limits(given, DEFAULT_REQUESTS, seconds=options.DEFAULT_OPEN_SECONDS)
    settings, runner = _one_server(session, given, ends_on_interrupt=False)
    session.finish(lambda: run_single(settings, runner, targets=session.targets))


@bench.command(
    cls=options.BenchCommand,
    epilog="""
\b
Example:
  headrace bench stream --url http://127.0.0.1:8000 --clients 8 --requests 64 --output-tokens 128 --html stream.html
""",
)
@SERVER
@LOAD
@ROUNDS
@options.OUTPUT
@click.pass_context
def stream(ctx: click.Context, /, rounds: int, keep_first: bool, **given: Any) -> None:
    """The same requests with streaming on and off, in alternation: what streaming gains, and what it costs.

    --requests or --duration is of one block. Default: 32 requests.
    """
    from headrace.cli.bench_session import Session
    from headrace.loadtest.studies.stream import run_stream

    session = Session(ctx, given)
    _limits(given, DEFAULT_BLOCK_REQUESTS)
    settings, runner = _one_server(session, given)
    session.finish(
        lambda: run_stream(
            settings,
            runner,
            rounds,
            targets=session.targets,
            is_first_discarded=not keep_first,
            on_block=_tell_block(session),
        )
    )


@bench.command(
    cls=options.BenchCommand,
    epilog="""
\b
Examples:
  headrace bench sweep --url http://127.0.0.1:8000 --clients 1,2,4,8,16,32 --prompt-tokens 128 --html sweep.html
  headrace bench sweep --url http://127.0.0.1:8000 --rates 0.5,1,2,4,8 --workload azure-conversation --scale 0.1
""",
)
@SERVER
@click.option(
    "--clients", "client_loads", metavar="N,N,...", help="Closed loop: clients of each point. Default: 1,2,4,8,16,32."
)
@click.option("--rates", metavar="R,R,...", help="Open loop instead: requests a second of each point.")
@click.option("--to-the-end", is_flag=True, help="Measure every point, even when the server is clearly past saturation.")
@options.ARRIVAL
@options.LENGTH_OF_RUN
@options.WORKLOAD
@options.CLIENT
@options.TARGETS
@options.STREAM
@options.OUTPUT
@click.pass_context
def sweep(ctx: click.Context, /, client_loads: str | None, rates: str | None, to_the_end: bool, **given: Any) -> None:
    """Load step by step: the knee, over-saturation, and signs of head-of-line blocking.

    --requests is the least of a point (default 48); points with many clients get at least four for each. By rates the default
    is 40 seconds a point.
    """
    from headrace.cli.bench_display import result_line
    from headrace.cli.bench_session import Session
    from headrace.loadtest.studies.sweep import Point, run_sweep

    if client_loads and rates:
        raise click.UsageError("a sweep is by --clients or by --rates, not both")
    is_rate = rates is not None
    loads = parse_loads(rates or client_loads or "1,2,4,8,16,32", is_whole=not is_rate)
    if given["arrival"] is not None and not is_rate:
        raise click.UsageError("--arrival is for a sweep by --rates")
    if given["arrival"] in ("ramp", "trace"):
        raise click.UsageError(f"--arrival {given['arrival']} has no one rate: a sweep cannot raise it")
    session = Session(ctx, given)
    given |= {"rate": loads[0], "clients": None} if is_rate else {"rate": None, "clients": int(loads[0])}
    _limits(given, DEFAULT_POINT_REQUESTS, is_open=is_rate, seconds=DEFAULT_RATE_SECONDS)
    settings, runner = _one_server(session, given)

    def tell(point: Point) -> None:
        session.display.say(result_line(point.result))

    session.finish(
        lambda: run_sweep(
            settings,
            loads,
            runner,
            is_rate=is_rate,
            targets=session.targets,
            is_stopped_early=not to_the_end,
            on_point=tell,
        )
    )


@bench.command(
    cls=options.BenchCommand,
    epilog="""
\b
Examples:
  headrace bench compare --server old=http://127.0.0.1:8000 --server new=http://127.0.0.1:9000,model=m --html compare.html
  headrace bench compare --server a=http://127.0.0.1:8000 --server b=https://host/v1,model=m,key=HOST_KEY --rounds 12
  headrace bench compare --url http://127.0.0.1:8000 --variant unique --variant shared:shared-prefix-tokens=128
""",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="NAME=URL[,model=ID][,key=VARIABLE]",
    help="A server to compare, two or more; the first is the baseline. key names an environment variable.",
)
@click.option("--url", help="One server, whose --variant settings are compared. Nothing is sent elsewhere.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME[:SETTING=VALUE,...]",
    help="Settings to compare on --url, two or more; the first is the baseline. Settings: api, clients, rate, prompt-tokens, "
    "output-tokens, scale, shared-prefix-tokens, salt=yes|no, stream=yes|no, temperature.",
)
@options.MODEL
@options.KEY
@options.API
@LOAD
@ROUNDS
@options.STREAM
@options.OUTPUT
@click.pass_context
def compare(ctx: click.Context, /, rounds: int, keep_first: bool, **given: Any) -> None:
    """Servers or settings in alternation (A B B A ...), in one run: ratios of paired blocks with 95 % intervals.

    A difference is claimed only when the interval excludes 1. --requests or --duration is of one block. Default: 32 requests.
    """
    from headrace.cli.bench_session import Session
    from headrace.loadtest.studies.paired import run_compare

    specs = [_parsed(parse_server, text, "--server") for text in given.pop("servers")]
    variants = [_parsed(parse_variant, text, "--variant") for text in given.pop("variants")]
    url = given.pop("url")
    _check_sides(specs, variants, url)
    session = Session(ctx, given)
    _limits(given, DEFAULT_BLOCK_REQUESTS)
    if specs:
        if (model := given.pop("model")) is not None:
            specs = [spec._replace(model=spec.model or model) for spec in specs]
        arms = _server_arms(session, specs, given)
    else:
        arms = _variant_arms(session, variants, given | {"url": url})
    session.finish(
        lambda: run_compare(
            arms,
            rounds,
            targets=session.targets,
            is_first_discarded=not keep_first,
            on_block=_tell_block(session),
        )
    )


def _parsed(parse: Any, text: str, option: str) -> Any:
    try:
        return parse(text)
    except click.BadParameter as error:
        error.param_hint = option
        raise


def _check_sides(specs: list[ServerSpec], variants: list[tuple[str, dict[str, object]]], url: str | None) -> None:
    if specs and (variants or url):
        raise click.UsageError("compare takes --server two or more times, or --url with --variant two or more times, not both")
    if variants and not url:
        raise click.UsageError("--variant needs --url")
    names = [spec.name for spec in specs] + [name for name, _ in variants]
    if len(names) < 2:
        raise click.UsageError("compare takes two or more --server, or --url and two or more --variant")
    if len(set(names)) < len(names):
        raise click.UsageError(f"the sides need different names, not {', '.join(names)}")


def _server_arms(session: "Session", specs: list[ServerSpec], given: dict[str, Any]) -> "list[Arm]":
    """One arm for each server, all with the same load. Only a key that a --server names is sent to it."""
    from headrace.loadtest.studies.alternation import Arm

    # One key for several servers would be shown to those that it is not for.
    if click.get_current_context().get_parameter_source("key") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("with --server a key is named there: NAME=URL,key=VARIABLE")
    given.pop("key")
    clients = given.get("clients")
    first = options.run_settings(given, url="", model="")
    arms = []
    for spec in specs:
        facts = session.server(spec.url, model=spec.model, key=spec.key, api=first.api)
        settings = msgspec.structs.replace(first, url=facts.url, model=facts.model)
        max_outstanding = clients if settings.arrival != "closed" else None
        arms.append(Arm(spec.name, settings, session.runner(facts, settings, key=spec.key, max_outstanding=max_outstanding)))
    return arms


def _variant_arms(session: "Session", variants: list[tuple[str, dict[str, object]]], given: dict[str, Any]) -> "list[Arm]":
    """One arm for each variant of the settings, on one server."""
    from headrace.loadtest.studies.alternation import Arm

    settings, runner = _one_server(session, given)
    for name, changes in variants:
        check_variant(name, settings, changes)
    return [Arm(name, msgspec.structs.replace(settings, **changes), runner) for name, changes in variants]


@bench.command(
    cls=options.BenchCommand,
    epilog="""
\b
Examples:
  headrace bench capacity --url http://127.0.0.1:8000 --target mlperf --prompt-tokens 128 --output-tokens 64
  headrace bench capacity --url http://127.0.0.1:8000 --target 800:60 --min-goodput 0.9 --duration 120 --json capacity.json
""",
)
@SERVER
@click.option("--min-goodput", type=NumberRange(0, 1, min_open=True), default=0.99, show_default=True, help="Wanted share.")
@click.option(
    "--start-rate", type=options.ABOVE_ZERO, help="Requests a second to begin with. Default: found with a few clients."
)
@click.option(
    "--max-runs", type=options.COUNT, default=14, show_default=True, help="Bound on runs; the report says when it was met."
)
@click.option(
    "--tolerance",
    type=options.ABOVE_ZERO,
    default=0.1,
    show_default=True,
    help="Bracket wanted: its ends differ by this share.",
)
@options.LENGTH_OF_RUN
@options.WORKLOAD
@options.CLIENT
@options.TARGETS
@options.STREAM
@options.OUTPUT
@click.pass_context
def capacity(ctx: click.Context, /, start_rate: float | None, **given: Any) -> None:
    """The highest rate (Poisson) at which goodput holds at the first --target, by bisection: a bracket.

    Refused, failed and unfinished requests are misses. A rate at which the queue grows all along does not hold. Default: 60
    seconds a run.
    """
    from headrace.cli.bench_display import result_line
    from headrace.cli.bench_session import Session
    from headrace.loadtest.report.tables import number
    from headrace.loadtest.studies.capacity import Trial, run_capacity

    session = Session(ctx, given)
    min_goodput = given.pop("min_goodput")
    search = {name: given.pop(name) for name in ("max_runs", "tolerance")}
    given |= {"rate": start_rate or 1.0, "clients": None}
    if len(session.targets) > 1 and ctx.get_parameter_source("targets") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("capacity is searched at one --target")
    _limits(given, DEFAULT_REQUESTS, is_open=True, seconds=options.DEFAULT_OPEN_SECONDS)
    settings, runner = _one_server(session, given)

    def tell(trial: Trial) -> None:
        verdict = "held" if trial.holds(min_goodput) else "did not hold"
        session.display.say(f"{result_line(trial.result)}  {number(trial.rate)} requests/s {verdict}")

    session.finish(
        lambda: run_capacity(
            settings,
            runner,
            target=session.targets[0],
            min_goodput=min_goodput,
            start_rate=start_rate,
            on_trial=tell,
            **search,
        )
    )


def _tell_block(session: "Session") -> Any:
    from headrace.cli.bench_display import result_line
    from headrace.loadtest.figures import summarize

    def tell(block: "Block", place: int, total: int) -> None:
        discarded = " (thrown away)" if block.round_number < 0 else ""
        session.display.say(f"block {place}/{total}{discarded}  {result_line(summarize(block.run, session.targets))}")

    return tell


bench.add_command(report_command)
