"""Long texts are tokenized on a few threads, so that the event loop never waits for one.

Owns: that thread pool and its bound. Runs in: gateway. Must not know: what the work is.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.errors import ErrorCode, RejectReason, RequestError

T = TypeVar("T")


class TextWorkers:
    """Runs short work at once and long work on a thread."""

    def __init__(self, settings: HttpSettings) -> None:
        self._long_text_chars = settings.long_text_chars
        self._max_waiting = settings.max_waiting_long_texts
        self._num_waiting = 0
        self._pool = ThreadPoolExecutor(max_workers=settings.long_text_threads, thread_name_prefix="headrace-text")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """The outcome of `work` over a text of so many characters. Raises RequestError OVERLOADED when too many wait."""
        if num_chars <= self._long_text_chars:
            return work()
        if self._num_waiting >= self._max_waiting:
            message = "Too many long texts wait to be tokenized."
            raise RequestError(message, code=ErrorCode.OVERLOADED, retry_after_seconds=1, reject_reason=RejectReason.QUEUE_FULL)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
