"""What a collector answers: however long, slow or odd, it costs neither memory nor the thread that exports."""

import logging
import threading
import time
from itertools import chain

import psutil
import pytest

from headrace.protocol.errors import ConfigurationError
from headrace.telemetry.otlp_session import CREDENTIAL_VARIABLES, MAX_BODY_BYTES, open_session
from headrace.telemetry.snapshot import TimelineSnapshot, TimelineStamps
from headrace.telemetry.tracing import open_tracing
from tests.telemetry.identities import identity
from tests.telemetry.odd_server import endless, odd_server

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 0.5
SNAPSHOT = TimelineSnapshot(identity(), TimelineStamps(1, 2, 3, 4, 5, 6, 7), "finished", "stop", "", 2, 0, 0, (), 0)
NUM_SPANS = 6
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(TIMEOUT_SECONDS))
    monkeypatch.setenv("NO_PROXY", "*")
    yield
    sdk = logging.getLogger("opentelemetry")
    sdk.handlers.clear()
    sdk.propagate = True


def export_to(url):
    """Export one trace; the closed tracing and how long it took, 20 seconds at most."""
    tracing = open_tracing(url, 1.0, "headrace", "1", "river")
    tracing.on_finished(SNAPSHOT)
    began = time.monotonic()
    thread = threading.Thread(target=tracing._provider.force_flush, args=(20_000,), daemon=True)
    thread.start()
    thread.join(20)
    took = time.monotonic() - began
    tracing.close()
    return tracing, took


@pytest.mark.parametrize(
    "head", [OK + b"\r\n", OK + b"content-encoding: gzip\r\n\r\n", OK + b"content-length: 9999999999\r\n\r\n"]
)
def test_an_endless_body_is_not_read_and_the_status_counts(head):
    before = psutil.Process().memory_info().rss
    with odd_server(lambda: chain([head], endless(b"x" * 1_000_000))) as odd:
        tracing, took = export_to(odd.url)
        assert (tracing.num_exported_spans, tracing.num_waiting_spans) == (NUM_SPANS, 0)
        assert odd.num_bytes < 32 << 20  # what the socket's buffers take
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert took < 15


@pytest.mark.parametrize(
    ("answer", "num_exported"),
    [
        (lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05), 0),
        (lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n"), 0),
        (lambda: endless(b"H", 0.05), 0),
        (lambda: chain([OK + b"x-a: "], endless(b"a", 0.05)), 0),
        (lambda: chain([OK], endless(b"x-a: b\r\n", 0.05)), 0),
        (lambda: chain([OK + b"\r\n"], endless(b"x", 0.05)), NUM_SPANS),
        (lambda: chain([OK + b"transfer-encoding: chunked\r\n\r\n"], endless(b"1\r\nx\r\n", 0.05)), NUM_SPANS),
    ],
    ids=["continue", "continue-flood", "status-line", "header", "headers", "body", "chunks"],
)
def test_what_drips_for_ever_ends_with_the_timeout(answer, num_exported):
    with odd_server(answer) as odd:
        tracing, took = export_to(odd.url)
    assert took < 15
    assert (tracing.num_exported_spans, tracing.num_failed_spans) == (num_exported, NUM_SPANS - num_exported)


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"307 Temporary Redirect", b"308 Permanent Redirect"])
def test_a_redirect_is_not_followed_and_no_success(status):
    with odd_server(lambda: [OK + b"content-length: 0\r\n\r\n"]) as elsewhere:
        head = b"HTTP/1.1 " + status + b"\r\nlocation: " + elsewhere.url.encode() + b"/v1/traces\r\ncontent-length: 0\r\n\r\n"
        with odd_server(lambda: [head]) as odd:
            tracing, _ = export_to(odd.url)
    assert (tracing.num_exported_spans, tracing.num_failed_spans) == (0, NUM_SPANS)
    assert elsewhere.requests == []


def test_a_connection_is_kept_and_a_body_that_fits_is_whole():
    body = b"y" * MAX_BODY_BYTES
    head = OK + b"content-length: %d\r\n\r\n" % len(body)
    with odd_server(lambda: [head + body]) as odd, open_session() as session:
        answer = session.post(odd.url, timeout=5)
        assert (answer.status_code, answer.content) == (200, body)
    with odd_server(lambda: [head.replace(b"65536", b"65537") + body + b"z"]) as odd, open_session() as session:
        assert session.post(odd.url, timeout=5).content == body


def test_an_unknown_credential_provider_is_said(monkeypatch):
    monkeypatch.setenv(CREDENTIAL_VARIABLES[1], "nobody")
    with pytest.raises(ConfigurationError, match="nobody"):
        open_tracing("http://127.0.0.1:4318", 1.0, "headrace", "1", "river")
