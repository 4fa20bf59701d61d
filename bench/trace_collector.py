"""A request's trace at a collector that is not Headrace's own: sent over OTLP, read back by the collector's API, and checked.

The collector is Arize Phoenix, from its Python package (about 1 GB with what it needs; a few minutes):

    python -m venv ~/peer-phoenix && ~/peer-phoenix/bin/pip install arize-phoenix
    python bench/trace_collector.py --phoenix ~/peer-phoenix/bin/phoenix

Headrace needs its extra `otel`. A collector that stands already, Phoenix too: --collector http://127.0.0.1:6006.
Not part of bench/all.py: it needs an environment of its own.
"""

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from harness import Server, free_port, serving

READY_SECONDS = 120
ARRIVAL_SECONDS = 30  # spans are sent every 5 s
TOLERANCE_NS = 1_000_000  # the collector keeps microseconds
PHASES = ("tokenize", "queue", "prefill", "decode")  # and "respond", where the end did not come with the last token


@contextlib.contextmanager
def phoenix(program: pathlib.Path) -> Iterator[str]:
    """Phoenix on free ports with a database of its own; its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, open(pathlib.Path(folder) / "log", "w+") as log:
        settings = {"WORKING_DIR": folder, "HOST": "127.0.0.1", "PORT": str(port), "GRPC_PORT": str(free_port())}
        environment = os.environ | {f"PHOENIX_{name}": value for name, value in settings.items()}
        environment["PHOENIX_TELEMETRY_ENABLED"] = "false"
        process = subprocess.Popen([str(program), "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while fetch(f"{url}/healthz") is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"Phoenix did not come up:\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def fetch(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, OSError):
        return None


def ask(server: Server, traceparent: str) -> tuple[dict[str, Any], str, int]:
    """One chat request; its answer, its request id, and how long it took for the client, in nanoseconds."""
    body = {"model": "traced", "messages": [{"role": "user", "content": "Tell me about rivers."}], "max_tokens": 40}
    headers = {"content-type": "application/json", "traceparent": traceparent, "tracestate": "bench=1"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    sent_ns = time.monotonic_ns()
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
        return answer, reply.headers["x-request-id"], time.monotonic_ns() - sent_ns


def read_back(collector: str, trace_id: str) -> list[dict[str, Any]]:
    """The trace's spans in OTLP's JSON form."""
    url = f"{collector}/v1/projects/default/spans/otlpv1?limit=100&trace_id={trace_id}"
    deadline = time.monotonic() + ARRIVAL_SECONDS
    num_seen = 0
    while time.monotonic() < deadline:
        spans = json.loads(fetch(url) or b'{"data":[]}')["data"]
        if any(span["name"].startswith("chat") for span in spans) and len(spans) == num_seen:  # no more are coming
            return list(spans)
        num_seen = len(spans)
        time.sleep(1)
    raise SystemExit(f"No trace came within {ARRIVAL_SECONDS} s.")


def attributes_of(span: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for entry in span["attributes"]:
        found[entry["key"]] = next((value for value in entry["value"].values() if value is not None), None)
    return found


def duration_ns(span: dict[str, Any]) -> int:
    return int(span["end_time_unix_nano"]) - int(span["start_time_unix_nano"])


def check(spans: list[dict[str, Any]], parent_id: str, answer: dict[str, Any], request_id: str, client_ns: int) -> list[str]:
    """What is wrong, one line each."""
    root = next(span for span in spans if span["name"].startswith("chat"))
    children = [span for span in spans if span is not root]
    wrong = []

    def expect(what: str, found: object, wanted: object) -> None:
        print(f"  {what:42} {found}")
        if found != wanted:
            wrong.append(f"{what}: {found!r}, not {wanted!r}")

    print(f"{root['name']}: {duration_ns(root) / 1e6:.3f} ms (for the client {client_ns / 1e6:.3f} ms)")
    expect("parent", root["parent_span_id"], parent_id)
    children.sort(key=lambda child: (int(child["start_time_unix_nano"]), int(child["end_time_unix_nano"])))
    expect("children", tuple(child["name"] for child in children if child["name"] != "respond"), PHASES)
    expect("children of this span", {child["parent_span_id"] for child in children}, {root["span_id"]})
    for child in children:
        print(f"    {child['name']:12} {duration_ns(child) / 1e6:10.3f} ms")
    gap_ns = duration_ns(root) - sum(map(duration_ns, children))
    print(f"  duration less the children's sum           {gap_ns / 1e6:.3f} ms")
    if abs(gap_ns) > TOLERANCE_NS:
        wrong.append(f"the children do not add up: {gap_ns} ns are left")
    if not 0 < duration_ns(root) <= client_ns:
        wrong.append("the span is not within what the client saw")
    usage, attributes = answer["usage"], attributes_of(root)
    for name, value in {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "traced",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "headrace.finish_reason": answer["choices"][0]["finish_reason"],
        "headrace.request.id": request_id,
        "http.route": "/v1/chat/completions",
    }.items():
        expect(name, attributes.get(name), value)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--phoenix", type=pathlib.Path, help="the program of that name in its environment")
    peer.add_argument("--collector", help="URL of a Phoenix that stands")
    parser.add_argument("--model", default="sim:step_ms=5", help="what headrace serves")
    options = parser.parse_args()
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        collector = options.collector or stack.enter_context(phoenix(options.phoenix))
        flags = ("--model", options.model, "--served-model-name", "traced", "--otlp-endpoint", collector)
        server = stack.enter_context(serving(*flags))
        answer, request_id, client_ns = ask(server, f"00-{trace_id}-{parent_id}-01")
        wrong = check(read_back(collector, trace_id), parent_id, answer, request_id, client_ns)
    print("\n".join(wrong) or "all as it must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
