"""The Protocol classes between the generation service and the API surfaces.

Owns: nothing but signatures. Runs in: gateway. Must not know: HTTP, rings, any implementation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.gateway.deltas import CallOutline, GenerationSpec, ModelCard, TextDelta
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import WorkerLimits
from headrace.telemetry.reports import DebugRequests, RequestReport


class GenerationStream(Protocol):
    """The text of one sequence as it is made. One consumer."""

    async def next_delta(self) -> TextDelta:
        """Text since the last call, merged when the consumer lags; waits when there is none.

        The last delta, and only it, has finish_reason (with usage) or error. The consumer does not call again after it.
        """
        ...

    def cancel(self) -> None:
        """Give up the sequence. Idempotent, and fine after the end. The consumer does not wait for a delta afterwards."""
        ...

    def timeline_report(self) -> RequestReport:
        """The sequence's timeline as known now; complete after the last delta."""
        ...

    def note_slow_reader(self, began_ns: int, duration_ns: int) -> None:
        """Its client did not take what was ready for so long. Call it only for waits over the stall threshold."""
        ...


class GenerationService(Protocol):
    """The one use case behind every API: prompt ids in, text out."""

    @property
    def card(self) -> ModelCard:
        """The served model; constant over the gateway's life."""
        ...

    def limits(self) -> WorkerLimits:
        """What a request may ask of the worker. Raises RequestError NOT_READY or DRAINING while no worker is ready."""
        ...

    def check_admission(self, call: CallOutline) -> None:
        """Turn a call away before its prompts are rendered and tokenized, which costs the most at the door.

        Raises RequestError: OVERLOADED or TENANT_OVER_SHARE with retry_after_seconds, NOT_READY, DRAINING.
        """
        ...

    def submit_call(self, specs: Sequence[GenerationSpec], call: CallOutline | None = None) -> Sequence[GenerationStream]:
        """Start all sequences of a call, or none. `call`: as check_admission has let it pass; None: it was not asked.

        Raises RequestError as check_admission does, and CONTENT_TOO_LARGE.
        """
        ...

    def readiness(self) -> RequestError | None:
        """None when requests are welcome, else why they are not."""
        ...

    def metrics_exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its content type."""
        ...

    def debug_requests(self, limit: int) -> DebugRequests:
        """Live requests and lately finished ones, at most `limit` of each."""
        ...

    def count_http(self, route: str, status: int) -> None:
        """One answered HTTP request. `route` is a path template or "unmatched"; 499 stands for a client that went away."""
        ...

    def count_rejection(self, code: str, reason: str = "") -> None:
        """One request for generation that was refused before it started.

        `code` is an ErrorCode's wire code, `reason` a RejectReason's value; "" for one that was not turned away at the door.
        """
        ...


class ChatEncoder(Protocol):
    """Chat messages to prompt ids: the model's template rendered and encoded. Safe to call from several threads at once."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of the rendered conversation. Raises RequestError CHAT_TEMPLATE_ERROR with the template's own reason."""
        ...
