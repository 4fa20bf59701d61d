"""The scripted server in a process of its own, and plans that drive it."""

import json
import pathlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace.loadtest.plan import LoadPlan, PlannedRequest, api_path
from headrace.loadtest.records import RunSettings

TRUTH_SERVER = pathlib.Path(__file__).parent.parent / "truth_server.py"
Steps = list[list[Any]]


class Truth:
    """The running scripted server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def log(self) -> dict[str, dict[str, Any]]:
        """What was sent, by the ids of the requests' scripts; the last one of each id."""
        with urllib.request.urlopen(f"{self.url}/log") as reply:
            return {sent["id"]: sent for sent in json.load(reply)}

    def plan(
        self,
        scripts: Sequence[dict[str, Any]],
        *,
        dues: Sequence[float] | None = None,
        api: str = "completions",
        settings: dict[str, Any] | None = None,
        **more: Any,
    ) -> LoadPlan:
        """A request for each script, its id the script's place (unless it has one). Closed loop with one client by default."""
        loop = {"arrival": "closed", "num_clients": 1} if dues is None else {"arrival": "trace"}
        wanted = {
            "url": self.url,
            "model": "m",
            "api": api,
            "num_processes": 1,
            "timeout_seconds": 20.0,
            **loop,
            **(settings or {}),
        }
        requests = [
            PlannedRequest(
                index=place,
                due=None if dues is None else dues[place],
                body={"model": "m", "truth": {"id": str(place), **script}},
            )
            for place, script in enumerate(scripts)
        ]
        return LoadPlan(settings=RunSettings(**wanted), requests=requests, path=api_path(api), **more)


@pytest.fixture(scope="module")
def truth() -> Iterator[Truth]:
    with subprocess.Popen(
        [sys.executable, str(TRUTH_SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield Truth(f"http://127.0.0.1:{int(process.stdout.readline())}")
        process.kill()


def stream(num_texts: int, gap_ms: float, *, first_ms: float = 50.0, head: Steps | None = None) -> dict[str, Any]:
    """A sound stream of single texts."""
    texts: Steps = [[first_ms if place == 0 else gap_ms, "text", f"word{place} "] for place in range(num_texts)]
    return {"steps": [*(head or []), *texts, [0, "finish", "length"], [0, "usage", 7, num_texts], [0, "done"]]}
