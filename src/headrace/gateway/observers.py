"""Those who are told of every request: the record, the traces. Opened when they are wanted.

Owns: request_observers. Runs in: gateway. Must not know: what they do with it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from headrace import __version__
from headrace.gateway.config import GatewayConfig
from headrace.gateway.starting import INCARNATION_SHIFT
from headrace.telemetry.export import MetricsExporter
from headrace.telemetry.journal import RequestListener
from headrace.telemetry.recorder import GatewayRecording
from headrace.telemetry.tracing import open_tracing


@dataclass(slots=True)
class RequestObservers:
    """`listeners`: for the journal, in the order in which they are told."""

    listeners: list[RequestListener] = field(default_factory=list)
    recording: GatewayRecording | None = None

    def add_probes(self, exporter: MetricsExporter) -> None:
        """Have the metrics say how the recording goes."""
        if self.recording is not None:
            recorder = self.recording.recorder
            exporter.add_probe("headrace_record_lines_total", lambda: recorder.num_lines, "gateway")
            exporter.add_probe("headrace_record_drops_total", lambda: recorder.num_drops, "gateway")


@contextmanager
def request_observers(config: GatewayConfig, model_name: str) -> Iterator[RequestObservers]:
    """Inside of the running event loop. At the end what waits is written and sent. Raises ConfigurationError."""
    with ExitStack() as stack:
        observers = RequestObservers()
        if config.record is not None:
            first_request_id = config.incarnation << INCARNATION_SHIFT
            recording = GatewayRecording(
                config.record, config.traffic, gateway=config.incarnation, first_request_id=first_request_id
            )
            stack.callback(recording.close)
            recording.start(asyncio.get_running_loop())
            observers.recording = recording
            observers.listeners.append(recording)
        endpoint = config.observation.otlp_endpoint
        if endpoint is not None:
            ratio = config.observation.trace_sample_ratio
            tracing = open_tracing(endpoint, ratio, "headrace", __version__, model_name)
            stack.callback(tracing.close)
            observers.listeners.append(tracing)
        yield observers
