"""Request traces over OpenTelemetry: the way in, which loads nothing as long as no endpoint is set.

Owns: open_tracing, what an endpoint may be. Runs in: gateway. Must not know: the SDK (otlp.py, loaded when it is wanted).
"""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.extras import how_to_install

if TYPE_CHECKING:
    from headrace.telemetry.otlp import Tracing

TRACES_PATH = "/v1/traces"


def open_tracing(endpoint: str, sample_ratio: float, service_name: str, service_version: str, model: str) -> "Tracing":
    """A RequestListener that exports one trace for each sampled request; close() it at the end.

    `endpoint`: a collector's base URL, or its URL for traces. `sample_ratio` (0..1): of the requests whose client sent no
    trace context. Raises ConfigurationError for values that cannot work, and where the packages are not installed.
    """
    url = traces_url(endpoint)
    if not 0.0 <= sample_ratio <= 1.0:
        raise ConfigurationError(f"The sample ratio of traces must be from 0 to 1, not {sample_ratio}.")
    try:
        from headrace.telemetry import otlp
    except ImportError as missing:
        raise ConfigurationError(
            f"Traces need packages that are not installed ({missing.name}): {how_to_install('otel')}"
        ) from missing
    return otlp.open_export(url, sample_ratio, service_name, service_version, model)


def traces_url(endpoint: str) -> str:
    """Where spans are posted to: the endpoint itself where it ends with /v1/traces, else /v1/traces beneath it.

    Raises ConfigurationError. The message does not repeat the endpoint where that may hold a secret.
    """
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        is_url = False
    if not is_url or not endpoint.isprintable() or " " in endpoint:
        raise ConfigurationError("The OTLP endpoint must be an http:// or https:// URL such as http://127.0.0.1:4318.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            "The OTLP endpoint must be a plain URL; credentials go into the environment as OTEL_EXPORTER_OTLP_HEADERS."
        )
    path = parts.path.rstrip("/")
    if not path.endswith(TRACES_PATH):
        path += TRACES_PATH
    return f"{parts.scheme}://{parts.netloc}{path}"
