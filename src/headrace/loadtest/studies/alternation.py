"""Arms measured in turn, forwards and backwards (A B, B A, ...), so that a drift of the machine meets all of them alike.

Owns: Arm, the order of blocks, the pooling of an arm's blocks. Runs in: load tool. Must not know: HTTP, how a run is made.
"""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from headrace.loadtest.figures import GoodputTarget, summarize
from headrace.loadtest.records import ClientLoad, RequestRecord, Run, RunSettings
from headrace.loadtest.results import RunResult
from headrace.loadtest.studies.errors import Ending

Measure = Callable[[RunSettings, str], Run]  # (settings, label of the run) -> what came back; blocks until it is over


@dataclasses.dataclass(frozen=True)
class Arm:
    """One side of a comparison: a server, or settings of one. `measure` knows the key, which settings never hold."""

    name: str
    settings: RunSettings
    measure: Measure


@dataclasses.dataclass(frozen=True)
class Block:
    """One short run of one arm. Blocks of equal `round_number` had the same requests and are a pair."""

    arm: str
    round_number: int
    run: Run


def round_order(num_arms: int, round_number: int) -> list[int]:
    """Forwards in even rounds, backwards in odd ones: two rounds of two arms are A B B A."""
    order = list(range(num_arms))
    return order if round_number % 2 == 0 else order[::-1]


def alternate(
    arms: Sequence[Arm],
    num_rounds: int,
    *,
    is_first_discarded: bool = True,
    on_block: Callable[[Block, int, int], None] | None = None,
) -> tuple[list[Block], Ending]:
    """Measure every arm once a round; the blocks of the rounds that count, in order of time.

    With `is_first_discarded` a round goes ahead of them whose blocks are thrown away: it warms the servers up. All arms of a
    round get the same seed, and so the same lengths and arrival times; the next round has another one. Ctrl-C and errors end
    the alternation early, as the Ending says: whole rounds are kept (half a round has no pair); without one they are raised.
    `on_block(block, number, total)` is called after each block, discarded ones included.
    """
    first = -1 if is_first_discarded else 0
    total = (num_rounds - first) * len(arms)
    kept: list[Block] = []
    number = 0
    with Ending(lambda: bool(kept)) as ending:
        for round_number in range(first, num_rounds):
            blocks = []
            for place in round_order(len(arms), round_number):
                arm = arms[place]
                settings = msgspec.structs.replace(arm.settings, seed=arm.settings.seed + round_number - first)
                blocks.append(Block(arm.name, round_number, arm.measure(settings, arm.name)))
                number += 1
                if on_block is not None:
                    on_block(blocks[-1], number, total)
            if round_number >= 0:
                kept += blocks
    return kept, ending


def pool_runs(runs: Sequence[Run], label: str) -> Run:
    """One run out of the measured windows of several, laid end to end; for the figures of an arm as a whole.

    What lies between the windows (start-up, warm-up, draining) has no place in it, so that rates are those of the windows.
    """
    if not runs:
        raise ValueError("nothing to pool")
    requests: list[RequestRecord] = []
    offset = 0.0
    for run in runs:
        shift = offset - run.window_begin
        inside = [record for record in run.requests if run.window_begin <= record.scheduled < run.window_end]
        requests += [_shifted(record, shift, len(requests) + place) for place, record in enumerate(inside)]
        offset += run.window_end - run.window_begin
    first = runs[0]
    return msgspec.structs.replace(
        first,
        label=label,
        wall_seconds=offset,
        window_begin=0.0,
        window_end=offset,
        client=_pool_clients([(run.client, run.window_end - run.window_begin) for run in runs]),
        requests=requests,
    )


def summarize_pooled(runs: Sequence[Run], label: str, targets: Sequence[GoodputTarget]) -> RunResult:
    """Figures of several runs of one kind as one. Latencies and goodput are of all their requests together.

    Rates are the means of the runs' own, weighted by their windows: what arrives at a window's edge belongs to its own run, and
    pooled it would be counted in the next one.
    """
    if len(runs) == 1:
        return summarize(msgspec.structs.replace(runs[0], label=label), targets)
    result = summarize(pool_runs(runs, label), targets)
    parts = [summarize(run, targets) for run in runs]
    seconds = sum(part.window_seconds for part in parts)
    return msgspec.structs.replace(
        result,
        requests_per_second=sum(part.requests_per_second * part.window_seconds for part in parts) / seconds,
        output_tokens_per_second=sum(part.output_tokens_per_second * part.window_seconds for part in parts) / seconds,
    )


def _shifted(record: RequestRecord, shift: float, index: int) -> RequestRecord:
    def moved(moment: float | None) -> float | None:
        return None if moment is None else moment + shift

    return msgspec.structs.replace(
        record,
        index=index,
        scheduled=record.scheduled + shift,
        sent=record.sent + shift,
        headers_at=moved(record.headers_at),
        first_event_at=moved(record.first_event_at),
        chunk_times=[moment + shift for moment in record.chunk_times],
        ended=moved(record.ended),
    )


def _pool_clients(loads: Sequence[tuple[ClientLoad, float]]) -> ClientLoad:
    """CPU averaged over the windows, everything else as in the worst of them; a bottleneck once is a bottleneck."""
    seconds = sum(window for _, window in loads) or 1.0
    clients = [load for load, _ in loads]
    slow = [load.why for load in clients if load.was_bottleneck]
    return ClientLoad(
        num_processes=max(load.num_processes for load in clients),
        cpu_cores_used=sum(load.cpu_cores_used * window for load, window in loads) / seconds,
        max_process_cpu_share=max(load.max_process_cpu_share for load in clients),
        send_lag_p50_seconds=max(load.send_lag_p50_seconds for load in clients),
        send_lag_p99_seconds=max(load.send_lag_p99_seconds for load in clients),
        loop_lag_p99_seconds=max(load.loop_lag_p99_seconds for load in clients),
        was_bottleneck=bool(slow),
        why=f"in {len(slow)} of {len(clients)} blocks: {slow[0]}" if slow else "",
    )
