"""Asks a server how many tokens a text has: by POST /tokenize where there is one, else by the usage of a one-token answer.

Owns: calibrate_against. Runs in: load tool, before the load. Must not know: runs, workloads.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from headrace.loadtest.plan import api_path, join_url
from headrace.loadtest.prompts import Calibration, calibrate

MAX_REPLY_BYTES = 4 << 20
PROBE_SECONDS = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer here: nothing is sent to an address that was not given."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def calibrate_against(url: str, model: str, api: str, headers: Mapping[str, str]) -> Calibration:
    """Two requests for one token each tell tokens a word and a request; a server without usage is asked by /tokenize instead.

    Usage goes first: it counts what the chat template adds. A server that tells neither, or does not answer, leaves a token a
    word, and the calibration says that it is assumed.
    """

    def by_usage(text: str) -> int | None:
        body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        reply = _post(join_url(url, api_path(api)), body, headers)
        usage = reply.get("usage")
        return _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None

    def by_tokenize(text: str) -> int | None:
        # vLLM reads "prompt" and answers with "count"; llama.cpp's server reads "content" and answers with "tokens".
        reply = _post(
            url.rstrip("/").removesuffix("/v1") + "/tokenize", {"model": model, "prompt": text, "content": text}, headers
        )
        tokens = reply.get("tokens")
        return _count(reply.get("count")) or (_count(len(tokens)) if isinstance(tokens, list) else None)

    found = calibrate(by_usage, "measured by usage")
    return found if not found.source.startswith("assumed") else calibrate(by_tokenize, "measured by /tokenize")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _post(url: str, body: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The reply's JSON object; an empty one for any refusal: the load itself will show what is wrong with the server."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    sent = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)  # noqa: S310 - http and https only, checked by callers
    try:
        with opener.open(request, timeout=PROBE_SECONDS) as reply:
            document = json.loads(reply.read(MAX_REPLY_BYTES))
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
