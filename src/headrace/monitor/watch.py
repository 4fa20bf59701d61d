"""The loop of `headrace top`: looks at the server again and again, and shows each frame until it is told to end.

Owns: watch, look_twice. Runs in: CLI. Must not know: HTTP, metrics.
"""

import contextlib
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.live import Live

from headrace.monitor.frame import frame_of
from headrace.monitor.model import Frame
from headrace.monitor.render import History, draw
from headrace.monitor.scrape import Scrape

KEY_POLL_SECONDS = 0.1
MAX_KEYS = 64  # read at once
SILENCE_SECONDS = 2.0  # beyond the interval: then the view says that it waits
MIN_REQUESTS_ASKED = 100  # of them those that wait are shown first


class Looker(Protocol):
    """What looks (see client.py)."""

    url: str

    def look(self, max_requests: int) -> Scrape:
        """One look; never raises for what the server does."""


def look_twice(looker: Looker, interval_seconds: float, max_requests: int) -> Frame:
    """One frame, with rates over one interval. Only the second look's failure is in it, or the first one's if there was one."""
    asked = max(max_requests, MIN_REQUESTS_ASKED)
    earlier = looker.look(asked)
    if earlier.error:
        return frame_of(looker.url, None, earlier, max_requests)
    time.sleep(interval_seconds)
    return frame_of(looker.url, earlier, looker.look(asked), max_requests)


def watch(looker: Looker, console: Console, interval_seconds: float, max_requests: int) -> None:
    """Until q, Ctrl-C or SIGTERM. Goes on whatever the server does."""
    frames: queue.Queue[Frame | Exception] = queue.Queue(maxsize=1)
    has_ended = threading.Event()
    args = (looker, interval_seconds, max_requests, frames, has_ended)
    thread = threading.Thread(target=_look_again_and_again, args=args, name="looks", daemon=True)
    with _ending_on_sigterm(), _single_keys(), contextlib.suppress(KeyboardInterrupt):
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                thread.start()
                _show(frames, console, live, interval_seconds)
        finally:
            has_ended.set()


def _show(frames: "queue.Queue[Frame | Exception]", console: Console, live: Live, interval_seconds: float) -> None:
    history = History()
    frame: Frame | None = None
    shown_at = time.monotonic()
    drawn: tuple[object, ...] = ()
    while not _is_q_pressed():
        with contextlib.suppress(queue.Empty):
            found = frames.get(timeout=KEY_POLL_SECONDS)
            if isinstance(found, Exception):
                raise found
            frame, shown_at = found, time.monotonic()
            history.note(frame)
        silent = time.monotonic() - shown_at - interval_seconds
        silent_seconds = int(silent) if silent >= SILENCE_SECONDS else 0
        width, height = console.size
        wanted = (frame, width, height, silent_seconds)
        if wanted == drawn:
            continue
        drawn = wanted
        if frame is None:
            live.update("Asking the server ...", refresh=True)
        else:
            live.update(draw(frame, history, width, height, silent_seconds), refresh=True)


def _look_again_and_again(
    looker: Looker,
    interval_seconds: float,
    max_requests: int,
    frames: "queue.Queue[Frame | Exception]",
    has_ended: threading.Event,
) -> None:
    earlier: Scrape | None = None
    try:
        while not has_ended.is_set():
            began = time.monotonic()
            scrape = looker.look(max(max_requests, MIN_REQUESTS_ASKED))
            frames.put(frame_of(looker.url, earlier, scrape, max_requests))
            earlier = scrape
            has_ended.wait(max(0.0, began + interval_seconds - time.monotonic()))
    except Exception as error:  # noqa: BLE001 - raised again where it is seen
        frames.put(error)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one and unseen, where standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_q_pressed() -> bool:
    if not sys.stdin.isatty() or not select.select([sys.stdin], [], [], 0)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), MAX_KEYS)
    return not keys or b"q" in keys.lower()


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does, so that the screen is given back."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
