"""`headrace simulate`: the scheduler under a virtual clock.

Owns: the command's options and files. Runs in: CLI. Must not know: how anything is simulated.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from headrace.cli.numbers import NumberRange
from headrace.launch.settings import load_settings
from headrace.loadtest.report.svg import PICTURE_KINDS, ChartsUnavailableError, require_charts
from headrace.protocol.errors import ConfigurationError
from headrace.protocol.traffic import Tenant, TrafficPolicy
from headrace.simulation.limits import RANGES
from headrace.simulation.picture import save_picture
from headrace.simulation.policies import POLICIES
from headrace.simulation.recorded import is_record, read_run, trace_path
from headrace.simulation.settings import ARRIVALS, DEFAULT_REQUESTS, ServerSettings, SimulationSettings, TrafficSettings
from headrace.simulation.step_model import StepFit, StepModel, fit_steps
from headrace.simulation.study import SimulationReport, run_study
from headrace.simulation.terminal import print_study, print_validation
from headrace.simulation.traffic import WORKLOADS, zipf_tenants
from headrace.simulation.validation import ValidationReport, validate

EXAMPLES = """
\b
Examples:
  headrace simulate
  headrace simulate --load 1.3 --workload azure-conversation --scale-lengths 0.25 --tenants 5 --picture compare.svg
  headrace simulate --rate 4 --workload "mix:interactive=0.7:fixed:128,64;batch=0.3:fixed:2048,128" --policies headrace,fcfs
  headrace simulate --workload trace:mooncake.jsonl --scale-lengths 0.125 --rate-scale 0.5 --max-model-len 16384
  headrace simulate --fit record.jsonl --workload trace:record.jsonl --json result.json
  headrace simulate --against record.jsonl           is the simulation right? compares it with what happened
"""
DEFAULT_LOAD = 1.0
DEFAULT_TRIES = 10
PIPE_COLUMNS = 140
MAX_DEFAULT_PROCESSES = 8
FILE = click.Path(dir_okay=False, path_type=Path)
READABLE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
SERVER_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "block_size", "max_queued_requests")


def _number(name: str) -> click.IntRange | NumberRange:
    """What the setting of that name can be."""
    low, high = RANGES[name]
    return click.IntRange(low, high) if isinstance(low, int) and isinstance(high, int) else NumberRange(low, high)


class _Command(click.Command):
    """Ends its help with the workloads and policies."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        with formatter.section("Workloads"):
            formatter.write_dl(list(WORKLOADS.items()))
        with formatter.section("Policies"):
            formatter.write_dl([(policy.name, policy.description) for policy in POLICIES.values()])


def _stacked(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


TRAFFIC = _stacked(
    click.option("--workload", default="azure-conversation", show_default=True, help="What is asked: see Workloads below."),
    click.option(
        "--requests",
        "num_requests",
        type=_number("num_requests"),
        help=f"So many requests.  [default: {DEFAULT_REQUESTS}; a trace: all]",
    ),
    click.option(
        "--duration",
        "duration_seconds",
        type=_number("duration_seconds"),
        help="Requests that come in so many simulated seconds.",
    ),
    click.option("--rate", type=_number("rate"), help="Requests a second; a trace is stretched to it."),
    click.option(
        "--load",
        type=_number("load"),
        help=f"Rate as a multiple of the capacity, which is measured first.  [default: {DEFAULT_LOAD:g}]",
    ),
    click.option(
        "--arrival",
        type=click.Choice(ARRIVALS[:-1]),
        help="How requests come.  [default: poisson; a trace has its own times]",
    ),
    click.option(
        "--burst-on",
        "burst_on_seconds",
        type=_number("burst_on_seconds"),
        help="bursty: mean seconds of a burst.  [default: 1]",
    ),
    click.option(
        "--burst-off",
        "burst_off_seconds",
        type=_number("burst_off_seconds"),
        help="bursty: mean seconds between.  [default: 4]",
    ),
    click.option(
        "--scale-lengths", "length_scale", type=_number("length_scale"), help="Multiply the lengths of a shape or trace."
    ),
    click.option("--rate-scale", type=_number("rate_scale"), help="A trace comes so many times as fast as recorded."),
    click.option(
        "--shared-prefix-tokens",
        type=_number("shared_prefix_tokens"),
        help="All prompts of a tenant begin with the same so many tokens.",
    ),
    click.option(
        "--max-tokens",
        type=_number("max_tokens"),
        help="What requests ask for.  [default: the next power of two of what they produce]",
    ),
    click.option(
        "--timeout", "timeout_seconds", type=_number("timeout_seconds"), help="Requests end unfinished after so many seconds."
    ),
    click.option("--classes", metavar="NAME=SHARE,...", help="Service classes of the requests, by share."),
    click.option("--tenants", metavar="N|NAME=SHARE,...", help="Tenants, by share; N of them with shares that fall as 1/rank."),
    click.option("--seed", type=_number("seed"), default=0, show_default=True, help="Of everything that is drawn."),
)
SERVER = _stacked(
    click.option("--config", type=click.Path(), help="headrace.toml: scheduler, queue, prefix cache, classes and tenants."),
    click.option("--max-num-seqs", type=_number("max_num_seqs"), help="Most sequences that run at once."),
    click.option("--max-num-batched-tokens", type=_number("max_num_batched_tokens"), help="Token budget of a step."),
    click.option("--max-model-len", type=_number("max_model_len"), help="Most tokens of a sequence."),
    click.option("--num-blocks", type=_number("num_blocks"), help="Size of the KV pool."),
    click.option("--block-size", type=_number("block_size"), help="Tokens of a block."),
    click.option(
        "--max-queued-requests", type=_number("max_queued_requests"), help="Most requests that wait beside the running ones."
    ),
    click.option(
        "--step-model", metavar="NAME=VALUE,...", help="step_ms, row_us, token_us, kv_ns, between_us: see docs/simulate.md."
    ),
    click.option("--fit", "fit_file", type=READABLE_FILE, metavar="RECORD", help="Fit the step model to a record's steps."),
)
COMPARISON = _stacked(
    click.option(
        "--policies",
        default="headrace,fcfs,no-chunking,reserve-max",
        show_default=True,
        metavar="NAME,...",
        help="What is compared.",
    ),
    click.option("--retry", is_flag=True, help="Refused requests come again after Retry-After."),
    click.option(
        "--max-tries",
        type=click.IntRange(2, int(RANGES["max_tries"].high)),
        help=f"Of a request with --retry.  [default: {DEFAULT_TRIES}]",
    ),
    click.option("--ttft-ms", type=_number("ttft_ms"), help="Target of TTFT in place of those of the classes."),
    click.option("--tbt-ms", type=_number("tbt_ms"), help="Target of worst-10% TBT in place of those of the classes."),
    click.option(
        "--warm-up",
        "warm_up_seconds",
        type=_number("warm_up_seconds"),
        default=0.0,
        help="Requests due in the first so many seconds are not measured.",
    ),
    click.option(
        "--window",
        "window_seconds",
        type=_number("window_seconds"),
        default=10.0,
        show_default=True,
        help="Seconds over which fairness is judged.",
    ),
)
OUTPUT = _stacked(
    click.option(
        "--against", type=READABLE_FILE, metavar="RECORD", help="Simulate a record's own requests and compare with their ends."
    ),
    click.option("--json", "json_file", type=FILE, help="Save everything; the same command gives the same bytes."),
    click.option("--picture", "picture_file", type=FILE, help="Draw the comparison: .svg or .png."),
    click.option(
        "--processes",
        "num_processes",
        type=click.IntRange(min=1),
        help=f"Policies that are simulated at once; results do not change.  [default: cores, at most {MAX_DEFAULT_PROCESSES}]",
    ),
    click.option("--quiet", is_flag=True, help="Print nothing but errors."),
)


@click.command(cls=_Command, epilog=EXAMPLES)
@TRAFFIC
@SERVER
@COMPARISON
@OUTPUT
@click.pass_context
def simulate(ctx: click.Context, /, **given: Any) -> None:
    """Run the real scheduler under a virtual clock: thousands of requests in seconds, several policies on the same traffic.

    Each step takes what a step-time model says. Unset limits of the server are those of a record that is replayed, else the
    defaults of `headrace serve`.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    is_quiet = given.pop("quiet")
    json_file, picture_file = given.pop("json_file"), given.pop("picture_file")
    if picture_file is not None:
        _check_picture(picture_file)
    num_processes = given.pop("num_processes") or min(os.cpu_count() or 1, MAX_DEFAULT_PROCESSES)
    against = given.pop("against")
    if against is not None:
        _refuse_ignored(ctx)
        report = _validate(against, given["step_model"], is_quiet=is_quiet)
        _save(json_file, report)
        if not is_quiet:
            print_validation(report, console)
        return
    fit = fit_steps(read_run(given["fit_file"]).steps) if given["fit_file"] is not None else None
    settings = _settings(given, fit)
    began = time.perf_counter()
    with _progress(is_quiet) as tell:
        study = run_study(settings, fit, tell, num_processes=num_processes)
    _save(json_file, study)
    if picture_file is not None:
        _draw(study, picture_file)
    if not is_quiet:
        print_study(study, console)
        num_steps, wall = sum(result.scheduler.num_steps for result in study.results), time.perf_counter() - began
        Console(stderr=True).print(f"{num_steps:,} steps in {wall:.1f} s", highlight=False)


def _settings(given: Mapping[str, Any], fit: StepFit | None) -> SimulationSettings:
    if given["step_model"] is not None and fit is not None:
        raise click.UsageError("--step-model and --fit both give the step model")
    if given["max_tries"] is not None and not given["retry"]:
        raise click.UsageError("--max-tries needs --retry")
    tenants = _tenants(given["tenants"])
    traffic = _traffic(given, tenants)
    server, policy = _server(given, traffic)
    known = set(policy.tenant_names)
    added = tuple(Tenant(name=name) for name in tenants if name not in known)
    model = fit.model if fit is not None else StepModel()
    if given["step_model"] is not None:
        model = StepModel.parse(given["step_model"])
    return SimulationSettings(
        server=server,
        traffic=traffic,
        step_model=model,
        policy=msgspec.structs.replace(policy, tenants=policy.tenants + added),
        policies=tuple(name.strip() for name in given["policies"].split(",") if name.strip()),
        max_tries=(given["max_tries"] or DEFAULT_TRIES) if given["retry"] else 1,
        ttft_ms=given["ttft_ms"],
        tbt_ms=given["tbt_ms"],
        warm_up_seconds=given["warm_up_seconds"],
        window_seconds=given["window_seconds"],
    )


def _traffic(given: Mapping[str, Any], tenants: dict[str, float]) -> TrafficSettings:
    is_trace = given["workload"].startswith("trace:")
    if is_trace and given["arrival"] is not None:
        raise click.UsageError("--arrival is not for a trace, which has its own times")
    arrival = "trace" if is_trace else given["arrival"] or "poisson"
    if arrival != "bursty" and (given["burst_on_seconds"] or given["burst_off_seconds"]):
        raise click.UsageError("--burst-on and --burst-off are for --arrival bursty")
    named = {key: given[key] for key in TrafficSettings.__struct_fields__ if given.get(key) is not None}
    named |= {"arrival": arrival, "classes": _shares(given["classes"], "--classes"), "tenants": tenants}
    if not is_trace and given["rate"] is None and given["load"] is None:
        named["load"] = DEFAULT_LOAD
    return TrafficSettings(**named)


def _server(given: Mapping[str, Any], traffic: TrafficSettings) -> tuple[ServerSettings, TrafficPolicy]:
    """Flags, over --config, over a replayed record, over the defaults."""
    server, policy = ServerSettings(), TrafficPolicy()
    path = trace_path(traffic)
    if path is not None and is_record(path):
        server = read_run(path).server()
    if given["config"] is not None:
        configured = load_settings(given["config"], {})
        policy = configured.traffic()
        server = msgspec.structs.replace(
            server,
            max_num_seqs=configured.scheduler.max_num_seqs,
            max_num_batched_tokens=configured.scheduler.max_num_batched_tokens,
            max_model_len=configured.scheduler.max_model_len or server.max_model_len,
            prefix_caching=configured.cache.prefix_caching,
            max_queued_requests=configured.server.max_queued_requests,
            admission=configured.server.admission,
            policy=configured.scheduler.policy,
            step_time_budget=configured.scheduler.step_time_budget,
            min_chunk_tokens=configured.scheduler.min_chunk_tokens,
            class_aging_seconds=configured.scheduler.class_aging_seconds,
        )
    flags = {name: given[name] for name in SERVER_OPTIONS if given[name] is not None}
    return msgspec.structs.replace(server, **flags), policy


def _tenants(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    if text.strip().isdecimal():
        if len(text.strip()) > 3 or not 1 <= int(text) <= 200:
            raise click.UsageError("--tenants: 1 to 200 of them")
        return zipf_tenants(int(text))
    return _shares(text, "--tenants")


def _shares(text: str | None, option: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in filter(None, ((text or "").split(","))):
        name, _, share = (piece.strip() for piece in part.partition("="))
        try:
            shares[name] = float(share)
        except ValueError:
            raise click.UsageError(f"{option}: {part!r} is not NAME=SHARE") from None
    return shares


def _refuse_ignored(ctx: click.Context) -> None:
    """--against takes traffic and server from the record."""
    allowed = {"against", "step_model", "json_file", "quiet", "num_processes"}
    explicit = click.core.ParameterSource.COMMANDLINE
    ignored = [name for name in ctx.params if name not in allowed and ctx.get_parameter_source(name) is explicit]
    if ignored:
        raise click.UsageError(f"--against takes traffic and server from the record: leave out {', '.join(sorted(ignored))}")


def _validate(path: Path, step_model: str | None, *, is_quiet: bool) -> ValidationReport:
    model = StepModel.parse(step_model) if step_model is not None else None
    num_requests = sum(not arrival.refused for arrival in read_run(path).arrivals)
    with _progress(is_quiet) as tell:
        if tell is None:
            return validate(path, model)
        show = tell
        return validate(path, model, lambda num_ended, now_ns: show(path.name, num_ended, num_requests))


@contextlib.contextmanager
def _progress(is_quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for each simulation, on a terminal."""
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} / {task.total:,.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(name: str, num_ended: int, num_requests: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=num_requests)
            bars.update(tasks[name], completed=num_ended)

        yield tell


def _check_picture(path: Path) -> None:
    """Before a long run that is to end in a picture."""
    if path.suffix.lower().removeprefix(".") not in PICTURE_KINDS:
        raise click.UsageError(f"--picture: the name must end in .{' or .'.join(PICTURE_KINDS)}")
    try:
        require_charts()
    except ChartsUnavailableError as error:
        raise click.ClickException(str(error)) from None


def _save(path: Path | None, report: SimulationReport | ValidationReport) -> None:
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"The result could not be saved: {error}.") from None


def _draw(report: SimulationReport, path: Path) -> None:
    try:
        save_picture(report, path)
    except OSError as error:
        raise ConfigurationError(f"The picture could not be saved: {error}.") from None
