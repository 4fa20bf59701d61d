"""Who may see and change the inside of the server: the guard before /debug.

Owns: AdminGuard. Runs in: gateway. Must not know: what is behind it.
"""

import hmac
import ipaddress

from headrace.gateway.http.exchange import Exchange
from headrace.protocol.errors import ErrorCode, RequestError

_FORWARDED_BY = frozenset({b"forwarded", b"via", b"x-real-ip", b"true-client-ip", b"cf-connecting-ip", b"client-ip"})
_FORWARDED_PREFIX = b"x-forwarded-"


class AdminGuard:
    """With a token: whoever sends it. Without: only clients on this machine, and no web page and no proxy on their behalf.

    A page whose name was rebound to 127.0.0.1 comes from a loopback address, but with its own name as Host; a proxy on this
    machine comes from one too, but says for whom it asks.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = None if token is None else token.encode()

    def check(self, exchange: Exchange) -> None:
        """Raise RequestError UNAUTHORIZED or FORBIDDEN for who may not."""
        if self._token is not None:
            self._check_token(exchange, self._token)
        elif not (_is_loopback_client(exchange) and _is_loopback_host(exchange) and not _is_forwarded(exchange)):
            raise RequestError(
                "This path is open only to clients on the server's own machine that ask by a loopback name and not through a "
                "proxy. To allow others, start the server with HEADRACE_ADMIN_TOKEN set and send that token as "
                "Authorization: Bearer TOKEN.",
                code=ErrorCode.FORBIDDEN,
            )

    def _check_token(self, exchange: Exchange, token: bytes) -> None:
        scheme, _, given = exchange.headers.get(b"authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(given.strip(), token)
        if scheme.lower() != b"bearer" or not is_right:
            message = "This path needs the server's admin token, sent as Authorization: Bearer TOKEN."
            raise RequestError(message, code=ErrorCode.UNAUTHORIZED)


def _is_loopback_client(exchange: Exchange) -> bool:
    client = exchange.scope.get("client")
    return client is not None and _is_loopback_address(str(client[0]))


def _is_loopback_host(exchange: Exchange) -> bool:
    host = exchange.headers.get(b"host", b"").decode("latin-1").strip().lower()
    if host.startswith("["):
        name, closing, port = host[1:].partition("]")
        if not closing or (port and not _is_port(port)):
            return False
        return _is_loopback_address(name)
    name, colon, port = host.partition(":")
    if colon and not _is_port(colon + port):
        return False
    return name == "localhost" or name.endswith(".localhost") or _is_loopback_address(name)


def _is_port(text: str) -> bool:
    return text.startswith(":") and (text[1:].isdecimal() or text == ":")


def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # what an IPv6 socket calls an IPv4 client
    return bool((mapped or address).is_loopback)


def _is_forwarded(exchange: Exchange) -> bool:
    return any(name in _FORWARDED_BY or name.startswith(_FORWARDED_PREFIX) for name in exchange.headers)
