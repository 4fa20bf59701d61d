"""Who a request is from and how urgently it is to be served, from its body and headers.

Owns: `service_tier`, `timeout`, x-headrace-class, -tenant, -timeout, and what is told of a request's origin. Runs in: gateway.
Must not know: how classes and tenants are served.
"""

import hashlib
import math
import re
import time
from dataclasses import dataclass, replace

from headrace.gateway.deltas import RequestOrigin
from headrace.gateway.http.exchange import DIGEST_BYTES, Exchange
from headrace.protocol.errors import RequestError
from headrace.protocol.traffic import BATCH, INTERACTIVE, ServiceClass, TrafficPolicy

CLASS_HEADER = b"x-headrace-class"
TENANT_HEADER = b"x-headrace-tenant"
TIMEOUT_HEADER = b"x-headrace-timeout"
MAX_TIMEOUT_SECONDS = 86_400.0
TIERS = ("auto", "default", "priority", "flex", "scale")
MAX_TRACEPARENT_CHARS = 128  # W3C Trace Context: 55 in its first version
MAX_TRACESTATE_CHARS = 2048

_NUMBER = re.compile(rb"[ \t]*[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[ \t]*")  # float() takes 1_0 too


@dataclass(frozen=True, slots=True)
class Routing:
    """The class and tenant of a request. `tier`: what the answer says as service_tier; None: it is not spoken of."""

    service_class: str
    tenant_id: str
    tier: str | None = None
    timeout_ns: int = 0  # from arrival to the last token; 0: none


def route_request(
    service_tier: str | None, timeout_seconds: float | None, exchange: Exchange, policy: TrafficPolicy
) -> Routing:
    """Class, tenant and timeout. Raises RequestError naming the field or header at fault."""
    routing = _route(service_tier, exchange, policy)
    timeout_ns = _timeout_ns(timeout_seconds, exchange)
    return replace(routing, timeout_ns=timeout_ns) if timeout_ns else routing


def _route(service_tier: str | None, exchange: Exchange, policy: TrafficPolicy) -> Routing:
    """The header names a class; without it service_tier chooses one, as OpenAI's API has it.

    priority is the most urgent class (interactive, if there is one), flex and scale the least urgent one (batch, if there is
    one), auto and default the default class. Raises RequestError for a tier or a class that does not exist.
    """
    if service_tier is not None and service_tier not in TIERS:
        raise RequestError(f"service_tier must be one of {', '.join(TIERS)}.", param="service_tier")
    tenant = policy.tenant_name(exchange.headers.get(TENANT_HEADER, b"").decode("latin-1").strip())
    urgent, patient = _urgent_class(policy), _patient_class(policy)
    named = exchange.headers.get(CLASS_HEADER)
    if named is not None:
        name = named.decode("latin-1").strip()
        if name not in policy.class_names:
            message = f"The header x-headrace-class must name one of the service classes {', '.join(policy.class_names)}."
            raise RequestError(message, param="x-headrace-class")
        tiers = {patient: "flex", urgent: "priority", policy.default_class: "default"}
        return Routing(name, tenant, tiers.get(name, "default"))
    if service_tier == "priority":
        return Routing(urgent, tenant, service_tier)
    if service_tier in ("flex", "scale"):
        return Routing(patient, tenant, service_tier)
    return Routing(policy.default_class, tenant, "default" if service_tier is not None else None)


def _timeout_ns(seconds: float | None, exchange: Exchange) -> int:
    """The header wins over the body's field, as with the class. 0 when neither is there."""
    param = "timeout"
    if (named := exchange.headers.get(TIMEOUT_HEADER)) is not None:
        param = TIMEOUT_HEADER.decode()
        seconds = float(named) if _NUMBER.fullmatch(named) else math.nan
    if seconds is None:
        return 0
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        message = f"{param} must be a number of seconds above 0 and at most {MAX_TIMEOUT_SECONDS:.0f}."
        raise RequestError(message, param=param)
    return max(1, round(seconds * 1e9))


def origin_of(exchange: Exchange, routing: Routing) -> RequestOrigin:
    """Where the request comes from; called when its prompts are tokenized, and before for what is asked of admission.

    The digest tells the same call, sent again, from all others: body, path, class and tenant are the same.
    """
    digest = hashlib.blake2b(exchange.body_digest, digest_size=DIGEST_BYTES)
    digest.update(f"\0{exchange.route}\0{routing.service_class}\0{routing.tenant_id}".encode())
    return RequestOrigin(
        digest=digest.digest(),
        client_request_id=exchange.request_id.decode(),
        received_ns=exchange.received_ns,
        tokenized_ns=time.monotonic_ns(),
        traceparent=_short_header(exchange, b"traceparent", MAX_TRACEPARENT_CHARS),
        tracestate=_short_header(exchange, b"tracestate", MAX_TRACESTATE_CHARS),
        api=exchange.route,
    )


def _short_header(exchange: Exchange, name: bytes, max_chars: int) -> str:
    value = exchange.headers.get(name, b"")
    return value.decode("latin-1") if len(value) <= max_chars else ""


def _urgent_class(policy: TrafficPolicy) -> str:
    return _known(policy, INTERACTIVE) or policy.classes[0].name


def _patient_class(policy: TrafficPolicy) -> str:
    return _known(policy, BATCH) or policy.classes[-1].name


def _known(policy: TrafficPolicy, entry: ServiceClass) -> str | None:
    return entry.name if entry.name in policy.class_names else None
