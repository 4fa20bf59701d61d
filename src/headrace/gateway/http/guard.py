"""Who may see and change the inside of the server: the guard before /debug.

Owns: AdminGuard. Runs in: gateway. Must not know: what is behind it.
"""

import hmac
import ipaddress
import re

from headrace.gateway.http.exchange import Exchange
from headrace.protocol.errors import ErrorCode, RequestError

_FORWARDED_BY = frozenset(
    {
        *(b"forwarded", b"via", b"x-real-ip", b"client-ip", b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip"),
        *(b"cf-connecting-ip", b"cf-connecting-ipv6", b"fly-client-ip", b"x-envoy-external-address", b"x-original-host"),
        b"x-original-forwarded-for",
    }
)
_FORWARDED_PREFIX = b"x-forwarded-"
_OTHER_SITES = frozenset({b"cross-site", b"same-site"})
_LOOPBACK_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?\.)*localhost")
_PORT = re.compile(r":[0-9]{0,5}")


class AdminGuard:
    """With a token: whoever sends it. Without: only clients on this machine, and no web page and no proxy on their behalf.

    A page whose name was rebound to 127.0.0.1 comes from a loopback address, but with its own name as Host; other pages show by
    Origin or Sec-Fetch-Site. A proxy on this machine comes from a loopback address too. It mostly says for whom it asks, or
    speaks HTTP/1.0. One that says nothing and asks by a loopback name over HTTP/1.1 cannot be told from a client, and the HTTP
    server does not show :authority of HTTP/2 where there is a Host: behind a proxy, only the token guards.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = None if token is None else token.encode()

    def check(self, exchange: Exchange) -> None:
        """Raise RequestError UNAUTHORIZED or FORBIDDEN for who may not."""
        if self._token is not None:
            self._check_token(exchange, self._token)
        elif not (
            _is_loopback_client(exchange)
            and _is_loopback_host(exchange)
            and _is_modern(exchange)
            and not (_is_forwarded(exchange) or _is_of_a_page(exchange))
        ):
            raise RequestError(
                "This path is open only to clients on the server's own machine that ask by a loopback name, over HTTP/1.1 or "
                "HTTP/2, and neither through a proxy nor from a web page. To allow others, start the server with "
                "HEADRACE_ADMIN_TOKEN set and send that token as Authorization: Bearer TOKEN.",
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
    host = exchange.headers.get(b"host", b"").decode("latin-1").strip(" \t").lower()
    if host.startswith("["):
        name, closing, port = host[1:].partition("]")
        return bool(closing) and _PORT.fullmatch(port or ":") is not None and _is_loopback_address(name)
    name, colon, port = host.partition(":")
    if _PORT.fullmatch((colon or ":") + port) is None:
        return False
    return _LOOPBACK_NAME.fullmatch(name) is not None or _is_loopback_address(name)


def _is_modern(exchange: Exchange) -> bool:
    """Not HTTP/1.0, which few clients but proxies speak still: they may leave out all that tells them."""
    version = str(exchange.scope.get("http_version", ""))
    return version == "1.1" or version.startswith(("2", "3"))


def _is_loopback_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # what an IPv6 socket calls an IPv4 client
    return bool((mapped or address).is_loopback)


def _is_forwarded(exchange: Exchange) -> bool:
    return any(name in _FORWARDED_BY or name.startswith(_FORWARDED_PREFIX) for name in exchange.headers)


def _is_of_a_page(exchange: Exchange) -> bool:
    """A browser asks for a page of some other site, or for a script that may do more than read."""
    return b"origin" in exchange.headers or exchange.headers.get(b"sec-fetch-site", b"").strip().lower() in _OTHER_SITES
