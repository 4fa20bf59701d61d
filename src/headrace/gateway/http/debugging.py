"""GET /debug/requests, GET and PUT /debug/log-level: for operators, behind the guard.

Owns: these endpoints. Runs in: gateway. Must not know: how requests are measured, how a level reaches other processes.
"""

from urllib.parse import parse_qs

import msgspec

from headrace.gateway.http.bodies import BodyReader
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.schemas import LogLevelReport, LogLevelRequest
from headrace.gateway.http.surface import Handler, Surface
from headrace.protocol.errors import RequestError
from headrace.telemetry.logs import current_level, get_logger

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
SETTABLE_LEVELS = ("debug", "info", "warning", "error")
_PRIVATE = [(b"cache-control", b"no-store")]

log = get_logger("http")


def requests(surface: Surface) -> Handler:
    """GET /debug/requests?limit=: live requests and lately finished ones."""

    async def handler(exchange: Exchange) -> None:
        surface.guard.check(exchange)
        report = surface.service.debug_requests(_limit(exchange))
        await exchange.respond(200, msgspec.json.encode(report), headers=_PRIVATE)

    return handler


def log_level(surface: Surface) -> Handler:
    """GET /debug/log-level: the least level that is logged."""

    async def handler(exchange: Exchange) -> None:
        surface.guard.check(exchange)
        await _answer_level(exchange)

    return handler


def set_log_level(surface: Surface) -> Handler:
    """PUT /debug/log-level: another level, in all processes, until the server ends."""
    reader = BodyReader(LogLevelRequest, surface.settings)

    async def handler(exchange: Exchange) -> None:
        surface.guard.check(exchange)
        wanted = (await reader.read(exchange)).level
        if wanted not in SETTABLE_LEVELS:
            raise RequestError(f"level must be one of {', '.join(SETTABLE_LEVELS)}.", param="level")
        log.warning("an operator changes the log level", level_before=current_level(), level_now=wanted)
        surface.ask_log_level(wanted)
        await _answer_level(exchange)

    return handler


async def _answer_level(exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(LogLevelReport(current_level())), headers=_PRIVATE)


def _limit(exchange: Exchange) -> int:
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    value = query.get("limit", [str(DEFAULT_LIMIT)])[-1]
    if not (value.isascii() and value.isdecimal() and len(value) <= 6 and 1 <= int(value) <= MAX_LIMIT):
        raise RequestError(f"limit must be a number from 1 to {MAX_LIMIT}.", param="limit")
    return int(value)
