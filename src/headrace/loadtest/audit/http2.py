"""Does the server speak HTTP/2? The one home of httpx.

Owns: Http2Client. Runs in: audit. Must not know: checks.
"""

from headrace.loadtest.audit.wire import Target


class Http2Client:
    """Asks with prior knowledge over http, and with ALPN over https."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def probe(self, path: str, headers: tuple[tuple[str, str], ...]) -> tuple[str, str]:
        """One GET: (version spoken, words for people). Raise ImportError when httpx or h2 is not installed."""
        import h2  # noqa: F401 - httpx needs it for HTTP/2, and says so only with another error
        import httpx

        is_tls = self._target.scheme == "https"
        how = "ALPN" if is_tls else "prior knowledge"
        try:
            async with httpx.AsyncClient(
                http1=is_tls, http2=True, timeout=10, follow_redirects=False, trust_env=False
            ) as client:
                reply = await client.get(f"{self._target.url}{path}", headers=list(headers))
        except httpx.HTTPError as error:
            return "", f"{how}: {type(error).__name__} {error}".strip()
        return reply.http_version, f"{how}: {reply.http_version}, status {reply.status_code}"
