"""The ASGI application: routes, and what becomes of errors.

Owns: the route table. Runs in: gateway. Must not know: how text is generated.

Plain ASGI throughout: nothing stands between a handler and the server's `send`, so that a token costs one call.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress

from starlette.routing import Route, Router

from headrace.gateway.http import debugging, operations
from headrace.gateway.http.answers import STARTED
from headrace.gateway.http.chat import ChatEndpoint
from headrace.gateway.http.completions import CompletionEndpoint
from headrace.gateway.http.errors import error_body, error_headers, internal_error
from headrace.gateway.http.exchange import STATUS_CLIENT_GONE, ClientGoneError, Exchange, Receive, Scope, Send
from headrace.gateway.http.guard import AdminGuard
from headrace.gateway.http.settings import HttpSettings
from headrace.gateway.http.surface import Handler, Surface
from headrace.gateway.http.text_workers import TextWorkers
from headrace.gateway.http.timelines import server_timing
from headrace.gateway.http.tokens import DetokenizeEndpoint, TokenizeEndpoint
from headrace.gateway.ports import ChatEncoder, GenerationService
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.ports import Tokenizer
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.logs import get_logger, set_level

log = get_logger("http")

GENERATION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})


class Application:
    """The HTTP surface as one ASGI callable. Its lifespan's end, or close(), ends the tokenizing threads."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        routes = [Route(template, _Endpoint(template, handlers)) for template, handlers in _handlers(surface).items()]
        self._router = Router(routes=routes, redirect_slashes=False, default=_no_such_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event, as ASGI 3 has it."""
        if scope["type"] == "http":
            exchange = Exchange(scope, receive, send)
            await self._answer(exchange)
            _never_failing(self._surface.service.count_http, exchange.route, exchange.status)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    def close(self) -> None:
        """Give back the threads."""
        self._surface.text_workers.close()

    async def _answer(self, exchange: Exchange) -> None:
        exchange.scope["headrace.exchange"] = exchange
        try:
            exchange.check_host()
            await self._router(exchange.scope, exchange.receive, exchange.send)
        except ClientGoneError:
            await _answer_broken_body(exchange)
            exchange.status = STATUS_CLIENT_GONE
        except RequestError as error:
            await self._refuse(exchange, error)
        except Exception:
            log.exception("a request failed inside the server", request_id=exchange.request_id.decode(), route=exchange.route)
            if exchange.status == 0:
                await self._refuse(exchange, internal_error())

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        if exchange.route in GENERATION_ROUTES and STARTED not in exchange.scope:
            reason = error.reject_reason.value if error.reject_reason is not None else ""
            _never_failing(self._surface.service.count_rejection, error.code.value.code, reason)
        body = error_body(error, exchange.timeline)
        headers = error_headers(error, exchange.scope.get("http_version", "1.1")) + exchange.allow_headers()
        headers += server_timing(exchange.timeline or ())
        await exchange.respond(error.code.value.http_status, body, headers=headers)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})


class _Endpoint:
    """The handlers of one path, by method. A class, so that Starlette takes it for an ASGI application and wraps nothing."""

    def __init__(self, template: str, handlers: Mapping[str, Handler]) -> None:
        self._template = template
        self._handlers = dict(handlers)
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["headrace.exchange"]
        exchange.route = self._template
        handler = self._handlers.get(exchange.method)
        if handler is None:
            exchange.allowed_methods = ", ".join(sorted(self._handlers))
            message = f"This path takes {exchange.allowed_methods} only."
            raise RequestError(message, code=ErrorCode.METHOD_NOT_ALLOWED)
        await handler(exchange)


def create_app(
    service: GenerationService,
    tokenizer: Tokenizer,
    chat_encoder: ChatEncoder,
    settings: HttpSettings | None = None,
    *,
    traffic: TrafficPolicy | None = None,
    stall_threshold_ns: int = 250_000_000,
    admin_token: str | None = None,
    ask_log_level: Callable[[str], None] = set_level,
    max_token_chars: int | None = None,
) -> Application:
    """The whole HTTP surface as one ASGI application. See Surface; `admin_token` None opens /debug to loopback clients."""
    settings = settings or HttpSettings()
    return Application(
        Surface(
            service,
            tokenizer,
            chat_encoder,
            settings,
            TextWorkers(settings),
            traffic or TrafficPolicy(),
            stall_threshold_ns,
            AdminGuard(admin_token),
            ask_log_level,
            max_token_chars,
        )
    )


def _handlers(surface: Surface) -> dict[str, dict[str, Handler]]:
    ready = {"GET": operations.ready(surface)}
    return {
        "/v1/chat/completions": {"POST": ChatEndpoint(surface)},
        "/v1/completions": {"POST": CompletionEndpoint(surface)},
        "/v1/models": {"GET": operations.models(surface)},
        "/v1/models/{model:path}": {"GET": operations.model(surface)},
        "/tokenize": {"POST": TokenizeEndpoint(surface)},
        "/detokenize": {"POST": DetokenizeEndpoint(surface)},
        "/health": ready,
        "/health/live": {"GET": operations.live(surface)},
        "/health/ready": ready,
        "/metrics": {"GET": operations.metrics(surface)},
        "/debug/requests": {"GET": debugging.requests(surface)},
        "/debug/log-level": {"GET": debugging.log_level(surface), "PUT": debugging.set_log_level(surface)},
        "/version": {"GET": operations.version(surface)},
        "/openapi.json": {"GET": operations.openapi(surface)},
        "/docs": {"GET": operations.docs(surface)},
    }


async def _answer_broken_body(exchange: Exchange) -> None:
    """A body that breaks off, or whose chunks are none, looks as if the client had gone; one that is there still hears why."""
    if exchange.status == 0:
        with suppress(Exception):  # mostly nobody is there
            await exchange.respond(400, error_body(RequestError("The request's body is not complete.")))


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise RequestError("There is nothing at this path; GET /docs lists what there is.", code=ErrorCode.NOT_FOUND)


def _never_failing(count: Callable[..., None], *args: str | int) -> None:
    """Metrics are worth a line in the log when they fail, never a request."""
    try:
        count(*args)
    except Exception:
        log.exception("counting a request failed")
