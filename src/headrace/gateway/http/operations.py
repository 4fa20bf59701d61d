"""What operators and clients ask beside generation: models, health, metrics, version, the interface's description.

Owns: those endpoints. Runs in: gateway. Must not know: generation.
"""

from collections.abc import Callable

import msgspec

from headrace import __version__
from headrace.gateway.http.docs_page import render_docs_page
from headrace.gateway.http.errors import error_headers
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.openapi import openapi_document
from headrace.gateway.http.parameters import check_model
from headrace.gateway.http.schemas import HealthReport, ModelEntry, ModelList, VersionReport
from headrace.gateway.http.surface import Handler, Surface

DOCS_HEADERS = [(b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'")]


def models(surface: Surface) -> Handler:
    """GET /v1/models."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode(ModelList([_entry(surface)])))

    return handler


def model(surface: Surface) -> Handler:
    """GET /v1/models/{id}. Raises MODEL_NOT_FOUND for any but the served one."""

    async def handler(exchange: Exchange) -> None:
        check_model(exchange.path_params["model"], surface.service.card)
        await exchange.respond(200, msgspec.json.encode(_entry(surface)))

    return handler


def live(surface: Surface) -> Handler:
    """GET /health/live: this process answers; also while it drains or waits for its worker."""
    del surface

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode(HealthReport("ok")))

    return handler


def ready(surface: Surface) -> Handler:
    """GET /health/ready and /health: the model is loaded and the worker makes progress; 503 with the reason otherwise."""

    async def handler(exchange: Exchange) -> None:
        error = surface.service.readiness()
        if error is None:
            await exchange.respond(200, msgspec.json.encode(HealthReport("ok")))
            return
        headers = error_headers(error, exchange.scope.get("http_version", "1.1")) or [(b"retry-after", b"1")]
        body = msgspec.json.encode(HealthReport(error.code.value.code, error.message))
        await exchange.respond(503, body, headers=headers)

    return handler


def metrics(surface: Surface) -> Handler:
    """GET /metrics, in Prometheus' text format."""

    async def handler(exchange: Exchange) -> None:
        body, content_type = surface.service.metrics_exposition()
        await exchange.respond(200, body, content_type.encode())

    return handler


def version(surface: Surface) -> Handler:
    """GET /version."""
    del surface
    return _constant(lambda: msgspec.json.encode(VersionReport(__version__)), b"application/json")


def openapi(surface: Surface) -> Handler:
    """GET /openapi.json, made when first asked for."""
    del surface
    return _constant(lambda: msgspec.json.encode(openapi_document()), b"application/json")


def docs(surface: Surface) -> Handler:
    """GET /docs: the OpenAPI document as a page to read. It loads nothing from anywhere."""
    model_id = surface.service.card.id
    return _constant(lambda: render_docs_page(openapi_document(), model_id).encode(), b"text/html; charset=utf-8", DOCS_HEADERS)


def _constant(make: Callable[[], bytes], content_type: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> Handler:
    made: list[bytes] = []

    async def handler(exchange: Exchange) -> None:
        if not made:
            made.append(make())
        await exchange.respond(200, made[0], content_type, headers)

    return handler


def _entry(surface: Surface) -> ModelEntry:
    card = surface.service.card
    return ModelEntry(id=card.id, created=card.created, root=card.id, max_model_len=surface.max_model_len())
