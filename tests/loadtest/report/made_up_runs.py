"""Runs made up with known figures, and reports of them (shared: a test that changes one copies it first)."""

import copy
import functools

import numpy as np

from headrace.loadtest.figures import summarize
from headrace.loadtest.records import ClientLoad, Outcome, RequestRecord, Run, RunSettings
from headrace.loadtest.report.model import Curve, Mark, Ratio, Report, ReportSection, Table, Verdict, VerdictKind


def make_client(**changes):
    values = {
        "num_processes": 2,
        "cpu_cores_used": 0.21,
        "max_process_cpu_share": 0.12,
        "send_lag_p50_seconds": 0.0002,
        "send_lag_p99_seconds": 0.0011,
        "loop_lag_p99_seconds": 0.002,
    }
    return ClientLoad(**(values | changes))


def make_run(
    label="",
    num_requests=40,
    rate=6.0,
    ttft=0.18,
    tbt=0.025,
    num_tokens=20,
    merged=1,
    seed=1,
    num_refused=0,
    num_failed=0,
    is_stream=True,
    client=None,
    warm_up=1.0,
    **settings,
):
    """Poisson arrivals, gamma gaps; the last `num_refused` + `num_failed` requests do not complete."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, num_requests))
    records = []
    for index, at in enumerate(map(float, due)):
        sent = at + float(rng.exponential(0.0004))
        record = RequestRecord(
            index=index, process=index % 2, is_stream=is_stream, scheduled=at, sent=sent, status=200, headers_at=sent + 0.002,
            target_prompt_tokens=128, target_output_tokens=num_tokens,
        )  # fmt: skip
        if index >= num_requests - num_refused:
            record.outcome, record.status, record.error_kind, record.ended = Outcome.REFUSED, 503, "http_503", sent + 0.003
            record.retry_after = 1.0
            records.append(record)
            continue
        first = sent + ttft * float(rng.gamma(8, 1 / 8))
        num_chunks = num_tokens // merged if is_stream else 1
        gaps = tbt * merged * rng.gamma(20, 1 / 20, num_chunks - 1)
        gaps[rng.random(num_chunks - 1) < 0.02] += 0.15
        record.chunk_times = [first, *(first + np.cumsum(gaps)).tolist()]
        record.chunk_chars = [5 * merged] * num_chunks
        record.counted_chunks = num_chunks
        record.first_event_at = first - 0.001
        record.ended = record.chunk_times[-1] + 0.001
        if index >= num_requests - num_refused - num_failed:
            record.outcome, record.error_kind, record.error_detail = Outcome.FAILED, "cut", "connection closed in a chunk"
        else:
            record.outcome, record.finish_reasons, record.num_done_marks = Outcome.COMPLETED, ["length"], 1
            record.prompt_tokens, record.output_tokens = 128, num_tokens
        records.append(record)
    wall = max(record.ended for record in records) + 0.2
    values = {
        "url": "http://127.0.0.1:8000/v1", "model": "SmolLM2-135M-Instruct", "arrival": "poisson", "rate": rate,
        "num_requests": num_requests, "prompt_tokens": 128, "output_tokens": num_tokens, "is_stream": is_stream,
        "warm_up_seconds": warm_up,
    } | settings  # fmt: skip
    return Run(
        label=label,
        settings=RunSettings(**values),
        started_at="2026-03-01T12:00:00+00:00",
        wall_seconds=wall,
        window_begin=warm_up,
        window_end=wall,
        client=client or make_client(),
        server={"server": "headrace 0.1.0"},
        environment={"python": "3.11.9", "platform": "Linux"},
        requests=records,
    )


_RESULTS = {}


def result_of(run):
    """summarize(), once for equal runs: its bootstrap takes most of the time of these tests."""
    key = repr(run)
    if key not in _RESULTS:
        _RESULTS[key] = summarize(run)
    return copy.deepcopy(_RESULTS[key])


def run_report(run, **changes):
    section = ReportSection(title="The run", results=[result_of(run)], runs=[run])
    values = {"kind": "run", "title": "A run", "command_line": "headrace bench run --url http://127.0.0.1:8000 --rate 6"}
    return Report(**(values | changes), created_at="2026-03-01T12:00:09+00:00", sections=[section])


@functools.cache
def compare_report():
    runs = [
        make_run(name, seed=10 * block + place, ttft=ttft, tbt=tbt)
        for block in range(2)
        for place, (name, ttft, tbt) in enumerate((("headrace", 0.16, 0.022), ("peer", 0.24, 0.026)))
    ]
    found = {
        "ttft_seconds/p50": (0.67, 0.6, 0.74),
        "tbt_seconds/p50": (0.85, 0.82, 0.88),
        "worst_tbt_seconds/p50": (0.99, 0.93, 1.06),
        "e2e_seconds/p50": (1.08, 1.02, 1.15),
        "output_tokens_per_second": (1.12, 1.05, 1.2),
    }
    ratios = [
        Ratio(
            subject="headrace", baseline="peer", figure=figure, value=value, low=low, high=high, num_pairs=30,
            is_lower_better=figure.partition("/")[0].endswith("_seconds"),
        )
        for figure, (value, low, high) in found.items()
    ]  # fmt: skip
    section = ReportSection(
        title="headrace against peer",
        intro="In alternation, blocks ABBA.",
        results=[result_of(run) for run in runs[:2]],
        runs=runs,
        ratios=ratios,
        verdicts=[Verdict(VerdictKind.OK, "headrace is faster to the first token: 0.67 (0.60 to 0.74).")],
    )
    return Report(kind="compare", title="headrace against peer", sections=[section])


@functools.cache
def sweep_report():
    clients = [1, 2, 4, 8, 16, 32, 64]
    runs = [
        make_run(
            f"{n} clients", num_requests=30, rate=3.0 + n, ttft=0.05 * (1 + n / 8), tbt=0.01 * (1 + n / 16), seed=n,
            num_tokens=24, arrival="closed", num_clients=n, warm_up=0.1,
        )
        for n in clients
    ]  # fmt: skip
    results = [result_of(run) for run in runs]
    rise = [(float(n), 95.0 * min(n, 14) + n) for n in clients]
    curves = [
        Curve(
            title="Throughput", x_label="clients", y_label="output tokens/s", series={"output tokens/s": rise},
            bands={"output tokens/s": [(x, 0.94 * y, 1.05 * y) for x, y in rise]}, marks=[Mark(14.0, "knee")], is_x_log=True,
        ),
        Curve(
            title="TTFT", x_label="clients", y_label="TTFT, seconds", is_x_log=True, is_y_log=True, marks=[Mark(14.0, "knee")],
            series={
                name: [(float(n), getattr(item.ttft_seconds, name)) for n, item in zip(clients, results, strict=True)]
                for name in ("p50", "p90", "p99")
            },
        ),
        Curve(
            title="TBT (ITL)", x_label="clients", y_label="TBT, seconds", is_x_log=True, is_y_log=True,
            series={
                name: [(float(n), getattr(item.tbt_seconds, name)) for n, item in zip(clients, results, strict=True)]
                for name in ("p50", "p90", "p99")
            },
        ),
    ]  # fmt: skip
    section = ReportSection(
        title="Concurrency",
        results=results,
        runs=runs,
        curves=curves,
        verdicts=[
            Verdict(VerdictKind.INFO, "The knee is at 14 clients."),
            Verdict(VerdictKind.OK, "No sign of head-of-line blocking: TTFT does not grow with the tokens queued ahead."),
            Verdict(VerdictKind.WARNING, "At 64 clients the server is over-saturated: TTFT rises through the whole run."),
        ],
        tables=[
            Table(title="Signs of head-of-line blocking", header=["sign", "found", "evidence"], rows=[["gaps", "no", "0.9 x"]])
        ],
    )
    return Report(kind="sweep", title="Sweep of SmolLM2-135M-Instruct", figures={"knee_clients": 14.0}, sections=[section])
