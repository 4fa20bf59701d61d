"""What a run is to send: each request with its time, and where it goes.

Owns: PlannedRequest, LoadPlan, the join of a server's address and a path. Runs in: load tool.
Must not know: how prompts are made, how requests are sent.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.loadtest.records import RunSettings

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
DEFAULT_MAX_OUTSTANDING = 4096


class PlannedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """One request to send, and the turns that follow it.

    `due`: seconds since the run's start; None in closed loop, where a free client takes the next one.
    `think_seconds`: a pause before sending: after the turn before (turns in `then`), or after the client became free (closed
    loop). It does not move a `due` time.
    `then`: later turns of the same conversation, in order; each is sent when the turn before has ended, well or badly, and its
    think time is over. Their own `due` and `then` are not looked at. One client (closed loop) sends the whole conversation.
    `headers`: of this request alone, over the plan's; no secrets.
    `body`: the JSON body with `model` in it and without `stream` and `stream_options`: the client adds these.
    """

    index: int  # unique in the run, turns included
    due: float | None = None
    group: str = ""
    body: dict[str, Any]
    target_prompt_tokens: int | None = None
    target_output_tokens: int | None = None
    think_seconds: float = 0.0
    headers: dict[str, str] = {}
    then: tuple["PlannedRequest", ...] = ()


class LoadPlan(msgspec.Struct, kw_only=True):
    """A whole run. `requests` may be endless (drawn from lazily, in order of `due`) when the settings limit it.

    The engine ends it by `settings.num_requests` (turns counted) and `settings.duration_seconds` (nothing is scheduled from
    then on, what runs may end), whichever comes first, or by the end of `requests`.
    `headers` may hold a key: they are sent, and never saved or shown.
    """

    settings: RunSettings
    requests: Iterable[PlannedRequest]
    path: str
    headers: dict[str, str] = {}
    opens_new_connections: bool = False  # a connection for each request; False: kept ones, opened before the clock starts
    # Open loop: most requests (conversations) under way at once; a loud warning when it was reached.
    max_outstanding: int = DEFAULT_MAX_OUTSTANDING

    def __repr__(self) -> str:
        return f"LoadPlan(url={self.url!r}, headers={sorted(self.headers)}, settings={self.settings!r})"

    @property
    def url(self) -> str:
        """Where the requests go."""
        return join_url(self.settings.url, self.path)


def api_path(api: str) -> str:
    """The path of an API by its name in the settings: "chat" or "completions". ValueError for another."""
    paths = {"chat": CHAT_PATH, "completions": COMPLETIONS_PATH}
    if api not in paths:
        raise ValueError(f"api is {api!r}; it must be one of {', '.join(sorted(paths))}")
    return paths[api]


def join_url(base: str, path: str) -> str:
    """`base` as people give it (with or without a last "/" or "/v1") and a path that begins with "/"."""
    base = base.rstrip("/")
    if base.endswith("/v1") and (path == "/v1" or path.startswith("/v1/")):
        base = base.removesuffix("/v1")
    return base + path
