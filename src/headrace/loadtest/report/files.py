"""Reports as files: JSON with everything needed to draw them anew, and CSV for spreadsheets.

Owns: the file format "headrace-bench", save_json, load_report, save_csv, save_requests_csv. Runs in: load tool.
Must not know: how a figure is computed or drawn.
"""

import csv
import gzip
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.loadtest.figures import timings_of
from headrace.loadtest.records import Outcome, RequestRecord, Run
from headrace.loadtest.report.clean_text import valid_text
from headrace.loadtest.report.model import REPORT_KINDS, Report
from headrace.loadtest.report.samples import is_measured
from headrace.loadtest.report.tables import DISTRIBUTION_KEYS, distribution_of
from headrace.loadtest.results import RunResult

FORMAT = "headrace-bench"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 2 << 30
PERCENTILES = ("mean", "min", "p50", "p90", "p99", "p999", "max")
_TIME_DIGITS = 6  # of raw records: microseconds, below the clock's own noise
_GZIP_MAGIC = b"\x1f\x8b"


class ReportFileError(Exception):
    """A saved report cannot be read or written; the text says which and why."""


def document(report: Report, with_records: bool = True) -> dict[str, Any]:
    """The report as plain JSON values. Raw records leave out what equals their default, and are rounded to microseconds.

    At the top stand `format`, `version`, `kind`, the report's `figures`, and for kind "run" the fields of its result.
    """
    top: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION, "kind": report.kind}
    results = list(report.results())
    if report.kind == "run" and results:
        top |= _clean(msgspec.to_builtins(results[0]))
    if taken := top.keys() & report.figures.keys():
        raise ValueError(f"these names of figures are taken at the top of the document: {', '.join(sorted(taken))}")
    top |= _clean(report.figures)
    bare = [msgspec.structs.replace(section, runs=[]) for section in report.sections]
    top["report"] = _clean(msgspec.to_builtins(msgspec.structs.replace(report, sections=bare)))
    if with_records:
        for section, saved in zip(report.sections, top["report"]["sections"], strict=True):
            saved["runs"] = [_compact_run(run) for run in section.runs]
    return top


def save_json(report: Report, path: Path, with_records: bool = True) -> None:
    """Write the document; gzip-compressed when the name ends in .gz.

    Raises: ReportFileError when it cannot be written.
    """
    data = msgspec.json.encode(document(report, with_records)) + b"\n"
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ReportFileError(f"{path} cannot be written: {error.strerror}") from None


def load_report(path: Path) -> Report:
    """Read what save_json wrote.

    Raises: ReportFileError when it is not there, no report, of a newer version, or damaged.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ReportFileError(f"{path} is larger than {MAX_FILE_BYTES >> 30} GiB")
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise ReportFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise ReportFileError(f'{path} is not a report of headrace bench ("format" is not "{FORMAT}")')
        if head.version > FORMAT_VERSION:
            raise ReportFileError(f"{path} has format version {head.version}; this Headrace reads up to {FORMAT_VERSION}")
        report = msgspec.json.decode(data, type=_Body).report
    except msgspec.MsgspecError as error:
        raise ReportFileError(f"{path} is not a whole report of headrace bench: {error}") from None
    if report.kind not in REPORT_KINDS:
        raise ReportFileError(f"{path} holds a report of the unknown kind {report.kind!r}")
    return report


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


class _Body(msgspec.Struct):
    report: Report


def save_csv(report: Report, path: Path) -> None:
    """One line for each result, its figures flattened (`ttft_seconds_p99`). Raises: ReportFileError."""
    _write_csv(path, [_result_row(result) for result in report.results()], _result_columns())


def save_requests_csv(report: Report, path: Path) -> None:
    """One line for each request of all runs, times in seconds since the run's start.

    Raises: ReportFileError when it cannot be written, or the report holds no raw records.
    """
    if not any(section.runs for section in report.sections):
        raise ReportFileError("there are no raw records (were they saved with --no-records?), and so no requests to list")
    rows = (
        _request_row(run, number, record)
        for section in report.sections
        for number, run in enumerate(section.runs)
        for record in run.requests
    )
    _write_csv(path, rows, _REQUEST_COLUMNS)


_RESULT_SETTINGS = (
    "url", "model", "api", "arrival", "num_clients", "rate", "workload", "prompt_tokens", "output_tokens", "is_stream", "seed",
)  # fmt: skip
_RESULT_FIGURES = (
    "window_seconds", "requests_per_second", "offered_per_second", "output_tokens", "output_tokens_per_second",
    "prompt_tokens", "goodput", "token_counts", "usage_mismatches",
)  # fmt: skip
_COUNTS = ("offered", "completed", "refused", "failed")
_REQUEST_COLUMNS = (
    "label", "run", "index", "process", "group", "is_stream", "is_measured", "scheduled", "sent", "connect_seconds",
    "headers_at", "first_event_at", "first_text_at", "last_text_at", "ended", "outcome", "status", "error_kind", "error_detail",
    "finish_reasons", "target_prompt_tokens", "target_output_tokens", "prompt_tokens", "output_tokens", "cached_tokens",
    "counted_chunks", "retry_after", "ttft_seconds", "tpot_seconds", "worst_tbt_seconds", "e2e_seconds",
)  # fmt: skip


def _result_columns() -> list[str]:
    figures = [f"{name}_{part}" for name in DISTRIBUTION_KEYS for part in (*PERCENTILES, "count")]
    client = ["client_cpu_cores", "client_send_lag_p99_seconds", "client_was_bottleneck"]
    return [
        "label",
        *(f"setting_{name}" for name in _RESULT_SETTINGS),
        *_COUNTS,
        *_RESULT_FIGURES,
        *figures,
        *client,
        "warnings",
    ]


def _result_row(result: RunResult) -> dict[str, Any]:
    row: dict[str, Any] = {"label": result.label, "warnings": " | ".join(result.warnings)}
    row |= {f"setting_{name}": getattr(result.settings, name) for name in _RESULT_SETTINGS}
    row |= {name: getattr(result.requests, name) for name in _COUNTS}
    row |= {name: getattr(result, name) for name in _RESULT_FIGURES}
    for name in DISTRIBUTION_KEYS:
        distribution = distribution_of(result, name)
        row |= {f"{name}_{part}": getattr(distribution, part) for part in (*PERCENTILES, "count")}
    row["client_cpu_cores"] = result.client.cpu_cores_used
    row["client_send_lag_p99_seconds"] = result.client.send_lag_p99_seconds
    row["client_was_bottleneck"] = result.client.was_bottleneck
    return row


def _request_row(run: Run, number: int, record: RequestRecord) -> dict[str, Any]:
    row = {name: getattr(record, name, None) for name in _REQUEST_COLUMNS}
    row |= {"label": run.label, "run": number, "is_measured": is_measured(run, record), "outcome": record.outcome.value}
    row["finish_reasons"] = " ".join(record.finish_reasons)
    timings = timings_of(record, is_open_loop=run.settings.arrival != "closed")
    if timings is not None:
        row |= {"first_text_at": record.chunk_times[0], "last_text_at": record.chunk_times[-1]}
        row |= {"ttft_seconds": timings.ttft, "tpot_seconds": timings.tpot, "worst_tbt_seconds": timings.worst_tbt}
        row["e2e_seconds"] = timings.e2e
    return row


def _write_csv(path: Path, rows: Iterable[dict[str, Any]], columns: Iterable[str]) -> None:
    names = list(columns)
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows([_csv_cell(row[name]) for name in names] for row in rows)
    except OSError as error:
        raise ReportFileError(f"{path} cannot be written: {error.strerror}") from None


def _csv_cell(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula is quoted: error texts come from the server."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else ""
    if isinstance(value, str):
        text = valid_text(value)
        return "'" + text if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
    return value


def _clean(value: Any) -> Any:
    """Plain values that JSON can hold: points and intervals that are not finite are left out, bare ones become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_text(key): _clean(item) for key, item in value.items() if not _is_broken_point(item)}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value if not _is_broken_point(item)]
    return value


def _is_broken_point(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, float) and not math.isfinite(item) for item in value)


def _compact_run(run: Run) -> dict[str, Any]:
    saved: dict[str, Any] = _clean(msgspec.to_builtins(msgspec.structs.replace(run, requests=[])))
    saved["requests"] = [_compact_record(record) for record in run.requests]
    return saved


_RECORD_DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    for field in msgspec.structs.fields(RequestRecord)
}


def _compact_record(record: RequestRecord) -> dict[str, Any]:
    builtin = ((name, value.value if isinstance(value, Outcome) else value) for name, value in _not_default(record))
    return {name: _clean(_rounded(value)) for name, value in builtin}


def _not_default(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    for name, default in _RECORD_DEFAULTS.items():
        value = getattr(record, name)
        if value != default:
            yield name, value


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _TIME_DIGITS)
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [round(item, _TIME_DIGITS) for item in value]
    return value
