"""A client process in a mood of its own: it `dies` after a while, `burns` most of its event loop's time, or `hurries`."""

import asyncio
import contextlib
import os
import sys
import time
from typing import Any

from headrace.loadtest import client_process


async def burn() -> None:
    while True:
        end = time.monotonic() + 0.06
        while time.monotonic() < end:
            pass
        await asyncio.sleep(0.04)


async def die() -> None:
    await asyncio.sleep(0.5)
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(7)


async def hurry() -> None:
    """Ahead of other work on this machine, where that is allowed."""
    with contextlib.suppress(AttributeError, PermissionError):  # not everywhere, not for everybody
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    fault, serve = {"burns": burn, "dies": die, "hurries": hurry}[sys.argv[1]], client_process.serve

    async def serve_badly(*streams: Any) -> None:
        task = asyncio.create_task(fault())
        await serve(*streams)
        task.cancel()

    client_process.serve = serve_badly
    client_process.main(sys.argv[2:])
