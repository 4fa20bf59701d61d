"""The HTTP session through which spans are posted: what a collector answers is bounded in size and time.

Owns: open_session; the one home of requests and urllib3. Runs in: gateway, the SDK's thread. Must not know: spans.
"""

import io
import os
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

from headrace.protocol.errors import ConfigurationError
from headrace.telemetry.bounded_answer import BoundedAnswer

MAX_BODY_BYTES = 1 << 16  # of an answer; more is not read
# The SDK's own way to name who makes a session with credentials (entry points of a group).
CREDENTIAL_VARIABLES = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
CREDENTIAL_GROUP = "opentelemetry_otlp_credential_provider"


def open_session() -> requests.Session:
    """A session for the exporter; that of a credential provider where OTEL_* variables name one.

    Raises ConfigurationError for a provider that is not there or makes something else.
    """
    session = requests.Session()
    if name := next(filter(None, map(os.environ.get, CREDENTIAL_VARIABLES)), ""):
        session = _session_of_provider(name)
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedAdapter())
    return session


def _session_of_provider(name: str) -> requests.Session:
    found = next(iter(entry_points(group=CREDENTIAL_GROUP, name=name)), None)
    if found is None:
        raise ConfigurationError(f"{CREDENTIAL_VARIABLES[0]}: no installed package has the credential provider {name!r}.")
    session = found.load()()
    if not isinstance(session, requests.Session):
        raise ConfigurationError(f"{CREDENTIAL_VARIABLES[0]}: the credential provider {name!r} makes no requests.Session.")
    return session


class _Connection(HTTPConnection):
    response_class = BoundedAnswer


class _SecureConnection(HTTPSConnection):
    response_class = BoundedAnswer


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


_POOLS: dict[str, Any] = {"http": _Pool, "https": _SecurePool}


class _BoundedAdapter(HTTPAdapter):  # type: ignore[misc]  # requests is not followed by the type checker
    """Head and body of an answer within the timeout, MAX_BODY_BYTES of the body; what comes beyond goes with the connection.

    The status decides whether spans were taken, so a body that is too long or too slow is cut and no fault. A redirect is one:
    the exporter does not follow it, and would count it as taken.
    """

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """As requests has it."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """As requests has it."""
        manager = super().proxy_manager_for(proxy, **kwargs)
        if not proxy.lower().startswith("socks"):  # those have connections of their own
            manager.pool_classes_by_scheme = _POOLS
        return manager

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """As requests has it. Raises requests.RequestException."""
        answer = super().send(*args, **kwargs)
        answer.raw = urllib3.HTTPResponse(io.BytesIO(_beginning(answer.raw)), status=answer.status_code, preload_content=False)
        if answer.is_redirect:
            raise requests.exceptions.InvalidURL(f"the collector answers {answer.status_code} with another address")
        return answer


def _beginning(answer: urllib3.BaseHTTPResponse) -> bytes:
    """Not decoded: a compressed body may grow a thousandfold."""
    body = bytearray()
    with suppress(urllib3.exceptions.HTTPError, OSError):
        while len(body) <= MAX_BODY_BYTES and (piece := answer.read(MAX_BODY_BYTES + 1 - len(body), decode_content=False)):
            body += piece
        if len(body) <= MAX_BODY_BYTES:
            return bytes(body)  # all of it: the connection is kept
    answer.close()
    return bytes(body[:MAX_BODY_BYTES])
