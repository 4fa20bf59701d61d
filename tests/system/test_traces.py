"""Traces on the wire: real processes, and a receiver that reads OTLP with the official messages."""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from harness import Server, free_port, post, serving

pytestmark = pytest.mark.slow

FLAGS = ("--model", "sim:step_ms=4", "--served-model-name", "sim", "--max-num-seqs", "8")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "A secret river."}], "max_tokens": 9, "ignore_eos": True}


class Receiver:
    """An OTLP/HTTP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str]]] = []
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.raw = b""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.posts.append((path, headers))
        self.raw += body
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {entry.key: entry.value.string_value for entry in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                self.spans.extend(scope_spans.spans)

    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def children_of(self, root: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == root.span_id]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    with made.server:
        yield made
        made.server.shutdown()
        thread.join(10)


def attributes_of(span: Span) -> dict[str, object]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def duration_ns(span: Span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


def ask(server: Server, path: str, body: dict, **headers: str) -> tuple[int, dict, str]:
    """Status, answer and request id."""
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), named)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply), reply.headers["x-request-id"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers["x-request-id"]


def test_requests_arrive_as_traces_whose_parts_add_up(receiver, monkeypatch):
    """Also what waits when the server is stopped: the spans of the last requests are sent at its end."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=river")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # nothing is sent before the end
    with serving(*FLAGS, "--otlp-endpoint", receiver.url) as server:
        before_ns = time.time_ns()
        status, answer, request_id = ask(
            server, "/v1/chat/completions", CHAT, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01", tracestate="a=1"
        )
        after_ns = time.time_ns()
        assert status == 200
        stream = {"model": "sim", "prompt": "A secret river.", "max_tokens": 30, "stream": True, "ignore_eos": True, "n": 2}
        assert asyncio.run(post(server, "/v1/completions", stream)).finish_reason == "length"
        ask(server, "/v1/chat/completions", CHAT, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")  # its client keeps no trace
        assert receiver.posts == []
    assert {path for path, _ in receiver.posts} == {"/v1/traces"}
    assert {headers["x-api-key"] for _, headers in receiver.posts} == {"river"}
    assert {headers["content-type"] for _, headers in receiver.posts} == {"application/x-protobuf"}
    assert receiver.resource["service.name"] == "headrace"

    assert sorted(root.name for root in receiver.roots()) == ["chat sim", "text_completion sim", "text_completion sim"]
    for root in receiver.roots():
        children = receiver.children_of(root)
        names = [child.name for child in children]
        assert names[:4] == ["tokenize", "queue", "prefill", "decode"]
        assert names[4:] in ([], ["respond"])  # the end mostly comes with the last token
        assert abs(sum(map(duration_ns, children)) - duration_ns(root)) < 1_000_000
        assert {child.trace_id for child in children} == {root.trace_id}

    (chat,) = (root for root in receiver.roots() if root.name.startswith("chat"))
    assert (chat.trace_id.hex(), chat.parent_span_id.hex(), chat.trace_state) == (TRACE_ID, SPAN_ID, "a=1")
    assert before_ns <= chat.start_time_unix_nano <= chat.end_time_unix_nano <= after_ns + 1_000_000_000
    assert duration_ns(next(child for child in receiver.children_of(chat) if child.name == "decode")) > 8 * 3_000_000
    found = attributes_of(chat)
    assert found["headrace.request.id"] == request_id
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 9
    assert [value.string_value for value in found["gen_ai.response.finish_reasons"].values] == ["length"]

    streams = [root for root in receiver.roots() if root is not chat]
    assert sorted(attributes_of(root)["headrace.choice"] for root in streams) == [0, 1]
    assert {root.parent_span_id for root in streams} == {b""}
    assert b"secret" not in receiver.raw


def test_a_lost_worker_is_the_traces_error(receiver):
    with serving(*FLAGS, "--otlp-endpoint", receiver.url) as server:

        async def run() -> None:
            body = {"model": "sim", "prompt": "A river.", "max_tokens": 3000, "stream": True, "ignore_eos": True}
            task = asyncio.create_task(post(server, "/v1/completions", body))
            await asyncio.sleep(1)
            server.worker.kill()
            await task

        asyncio.run(run())
    (root,) = receiver.roots()
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes_of(root)["error.type"] == "worker_lost"
    children = receiver.children_of(root)
    assert [child.name for child in children] == ["tokenize", "queue", "prefill", "decode"]
    assert attributes_of(children[-1])["headrace.phase.cut_off"] is True
    assert sum(map(duration_ns, children)) == duration_ns(root)


def test_a_collector_that_is_not_there_fails_no_request_and_no_exit(tmp_path):
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "headrace", "serve", *FLAGS, "--port", str(port), "--log-format", "json"]
    with log.open("w") as stderr:
        process = subprocess.Popen([*command, "--otlp-endpoint", f"http://127.0.0.1:{free_port()}"], stderr=stderr)
    server = Server(process, "127.0.0.1", port, 0.0)
    try:
        server.wait_ready(60)
        body = {"model": "sim", "prompt": "A river.", "max_tokens": 2}
        replies = [ask(server, "/v1/completions", body) for _ in range(120)]  # more spans than one batch
        assert [status for status, _, _ in replies] == [200] * 120
    finally:
        process.terminate()
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if "tracing" in line or "opentelemetry" in line]
    told = [line["event"] for line in lines if line.get("component") == "tracing"]
    assert told == ["traces do not get through", "spans_lost"]
    assert len(lines) == 2  # nothing of the SDK besides
    assert lines[-1]["num_spans"] >= 120 * 5


@pytest.mark.parametrize(
    ("endpoint", "told"), [("collector:4318", "OTLP endpoint"), ("http://key@host", "OTEL_EXPORTER_OTLP_HEADERS")]
)
def test_an_endpoint_that_cannot_work_ends_the_start(endpoint, told):
    command = [sys.executable, "-m", "headrace", "serve", *FLAGS, "--port", str(free_port()), "--otlp-endpoint", endpoint]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert told in ended.stderr


def test_without_an_endpoint_nothing_of_it_is_loaded():
    """Neither by the way in, nor by what a gateway process loads."""
    code = (
        "import sys, headrace.telemetry.tracing, headrace.gateway.process; print([m for m in sys.modules if 'telemetry' in m])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "headrace.telemetry.tracing" in loaded
    assert "opentelemetry" not in loaded
