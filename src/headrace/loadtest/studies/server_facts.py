"""Asks a server who it is before load is put on it, so that a wrong URL, key or model is one clear line and not a failed run.

Owns: the shape of a base URL, the model's id, the facts that a run records. Runs in: load tool. Must not know: runs, figures.
"""

import functools
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from typing import Any

import msgspec

from headrace.loadtest.plan import api_path
from headrace.loadtest.studies.errors import StudyError

PROBE_SECONDS = 60.0  # a server that is busy with others may take a while to answer one small request
MAX_REPLY_BYTES = 1 << 20
MAX_FACT_CHARACTERS = 200
MAX_SAID_CHARACTERS = 300
MAX_LISTED_MODELS = 12


class ServerFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of a server before the load."""

    url: str  # base, without /v1
    model: str
    facts: dict[str, str] = {}  # "server", "version", "max_model_len"


class Reply(msgspec.Struct, frozen=True):
    """An answer: its status, its Server header, its body up to MAX_REPLY_BYTES."""

    status: int
    server: str
    body: bytes

    def document(self) -> Any:
        """The JSON value, None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


Ask = Callable[[str, dict[str, Any] | None], Reply]  # (path, JSON body of a POST or None for a GET)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer here: nothing is ever sent to an address that was not given."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        raise StudyError(f"{req.full_url} redirects to {_shown(newurl)}. Give that URL if you mean it; nothing was sent there.")


def base_url(url: str) -> str:
    """The URL without a trailing slash or /v1. StudyError when it is not http or https, or holds a query or a password."""
    text = url.strip()
    if "://" not in text:
        text = "http://" + text
    try:
        parts = urllib.parse.urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise StudyError(f"{url!r} is not a URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StudyError(f"{url!r} is not an http or https URL.")
    if parts.query or parts.fragment:
        raise StudyError(f"{url!r}: a base URL has no query or fragment, such as http://127.0.0.1:8000 or http://host/v1.")
    if parts.username or parts.password:
        raise StudyError("A key or password does not belong in the URL, which is saved with the results: use --key.")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1").rstrip("/"), "", ""))


def look_up(url: str, *, model: str | None, key: str | None, api: str, ask: Ask | None = None) -> ServerFacts:
    """Find the model's id and prove with one request for a single token that the load will be answered.

    StudyError, for people, when the server is not reachable, wants another key, does not know the model or refuses the request.
    `ask` is how the server is asked; None: over HTTP.
    """
    base = base_url(url)
    if ask is None:
        ask = functools.partial(ask_server, base, key)
    listing = ask("/v1/models", None)
    if listing.status in (401, 403):
        raise StudyError(_denied(base, listing.status, key))
    entries = _model_entries(listing)
    chosen = model or _only_model(base, entries, listing.status)
    proof = _prove(base, chosen, key, api, list(entries), ask)
    facts = {"server": listing.server or proof.server, "version": _version(ask)}
    length = entries.get(chosen, {}).get("max_model_len")
    if isinstance(length, int) and not isinstance(length, bool):
        facts["max_model_len"] = str(length)
    return ServerFacts(url=base, model=chosen, facts={name: value for name, value in facts.items() if value})


def _model_entries(reply: Reply) -> dict[str, dict[str, Any]]:
    document = reply.document()
    data = document.get("data") if reply.status == 200 and isinstance(document, dict) else None
    if not isinstance(data, list):
        return {}
    return {entry["id"]: entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)}


def _only_model(base: str, entries: dict[str, dict[str, Any]], status: int) -> str:
    if len(entries) == 1:
        return next(iter(entries))
    if not entries:
        raise StudyError(f"{base}/v1/models names no model (status {status}). Name it with --model.")
    raise StudyError(f"{base} serves several models; choose one with --model: {_listed(list(entries))}.")


def _prove(base: str, model: str, key: str | None, api: str, known: list[str], ask: Ask) -> Reply:
    text = "Hello"
    body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
    path = api_path(api)
    reply = ask(path, body)
    if reply.status == 200:
        return reply
    said = _said(reply)
    if reply.status in (401, 403):
        raise StudyError(_denied(base, reply.status, key))
    if reply.status == 404 and known and model not in known:
        raise StudyError(f"{base} does not know the model {model!r}. It serves: {_listed(known)}.")
    if reply.status in (404, 405):
        raise StudyError(f"{base}{path} answers {reply.status}: {said} Is the URL right, and --api?")
    raise StudyError(f"{base}{path} answers {reply.status} to a request for one token: {said}")


def _version(ask: Ask) -> str:
    """From /version, which many servers have; "" elsewhere: a missing version is no fault."""
    try:
        reply = ask("/version", None)
    except StudyError:
        return ""
    document = reply.document()
    version = document.get("version") if reply.status == 200 and isinstance(document, dict) else None
    return version[:MAX_FACT_CHARACTERS] if isinstance(version, str) else ""


def ask_server(base: str, key: str | None, path: str, body: dict[str, Any] | None) -> Reply:
    """One request to `base` + `path`; any status is an answer. StudyError when there is none."""
    headers = {"Accept": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None
    if body is not None:
        headers["Content-Type"] = "application/json"
        data = json.dumps(body).encode()
    # No proxies: what is measured is the server at this address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    request = urllib.request.Request(base + path, data, headers)  # noqa: S310 - base_url admits http and https only
    try:
        with opener.open(request, timeout=PROBE_SECONDS) as reply:
            return Reply(reply.status, _server_of(reply.headers), reply.read(MAX_REPLY_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, _server_of(error.headers), error.read(MAX_REPLY_BYTES))
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise StudyError(f"{base}{path} did not answer within {PROBE_SECONDS:g} s.") from None
        raise StudyError(f"{base} is not reachable: {reason}. Is the server running, and is the port right?") from None


def _server_of(headers: Message) -> str:
    return (headers.get("Server") or "")[:MAX_FACT_CHARACTERS]


def _denied(base: str, status: int, key: str | None) -> str:
    if key:
        return f"{base} does not accept the key ({status}). Give another with --key, HEADRACE_BENCH_KEY or OPENAI_API_KEY."
    return f"{base} wants a key ({status}). Give it with --key, HEADRACE_BENCH_KEY or OPENAI_API_KEY."


def _listed(models: list[str]) -> str:
    more = f" and {len(models) - MAX_LISTED_MODELS} more" if len(models) > MAX_LISTED_MODELS else ""
    return ", ".join(_shown(name) for name in models[:MAX_LISTED_MODELS]) + more


def _said(reply: Reply) -> str:
    """The server's own words, bounded, without control characters."""
    document = reply.document()
    text: Any = document
    for name in ("error", "message"):
        if isinstance(text, dict) and name in text:
            text = text[name]
    words = text if isinstance(text, str) else reply.body.decode("utf-8", "replace")
    shown = _shown(words)
    return shown if shown.endswith((".", "!", "?")) else f"{shown or 'no message'}."


def _shown(text: str) -> str:
    """What a server said, fit for one line of a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MAX_SAID_CHARACTERS]).strip()
