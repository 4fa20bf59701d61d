"""The door as the service sees it: who asks, how long its prompt is before anybody has tokenized it, and what to call it by.

Owns: Door, TokenEstimate. Runs in: gateway, on the event loop. Must not know: rings, HTTP, the clock (time is an argument).
"""

from collections.abc import Sequence
from functools import partial

from headrace.gateway.admission import AdmissionControl, Permit
from headrace.gateway.deltas import CallOutline, GenerationSpec
from headrace.gateway.outlook import Applicant
from headrace.protocol.errors import RequestError
from headrace.protocol.ports import Clock
from headrace.protocol.traffic import DEFAULT_TENANT, TrafficPolicy
from headrace.telemetry.export import MetricsExporter

FIRST_CHARS_PER_TOKEN = 4.0  # English with common vocabularies, until something was measured
LEARNT_CHARS = 4000.0  # the first guess weighs as much as so much text
MEMORY = 0.98  # weight of the past with each call


class TokenEstimate:
    """Characters per token of the texts that were tokenized lately: sums that fade, so that long texts count as such."""

    def __init__(self) -> None:
        self._num_chars = LEARNT_CHARS
        self._num_tokens = LEARNT_CHARS / FIRST_CHARS_PER_TOKEN

    def tokens_of(self, num_chars: int) -> int:
        """About as many tokens as a text of so many characters has; at least 1 for any text."""
        return max(1, round(num_chars * self._num_tokens / self._num_chars)) if num_chars else 0

    def learn(self, num_chars: int, num_tokens: int) -> None:
        """So many characters were so many tokens, what a template added included."""
        if num_chars > 0 and num_tokens > 0:
            self._num_chars = MEMORY * self._num_chars + num_chars
            self._num_tokens = MEMORY * self._num_tokens + num_tokens


class Door:
    """Asks admission for calls: each is one applicant, whatever the number of its sequences."""

    def __init__(self, admission: AdmissionControl, traffic: TrafficPolicy) -> None:
        self._admission = admission
        self._default_class = traffic.class_of(traffic.default_class)
        self._classes = {entry.name: entry for entry in traffic.classes}
        self._estimate = TokenEstimate()

    def num_prompt_tokens(self, call: CallOutline) -> int:
        """Of all its sequences, about."""
        return call.num_token_ids + self._estimate.tokens_of(call.num_chars)

    def check(self, call: CallOutline, now_ns: int) -> None:
        """Refuse the call now or let it pass on. Raises RequestError: as `admit`, and INVALID_VALUE for too many sequences."""
        applicant = self._applicant(call.service_class, call.tenant_id, call.origin.digest, call.timeout_ns)
        most = self._admission.max_call_requests(applicant)
        if call.num_sequences > most:
            message = f"The call asks for {call.num_sequences} answers; in its class this server holds {most} at once."
            raise RequestError(message, param="n")
        self._admission.check(self.num_prompt_tokens(call), now_ns, applicant, call.num_sequences)

    def admit(self, specs: Sequence[GenerationSpec], now_ns: int, call: CallOutline | None) -> list[Permit]:
        """A permit for each sequence of a call, or RequestError. `call`: what `check` let pass just now; None: nothing was."""
        first = specs[0]
        lengths = [len(spec.prompt_token_ids) for spec in specs]
        if call is not None:
            self._estimate.learn(call.num_chars, sum(lengths) - call.num_token_ids)
        applicant = self._applicant(first.service_class, first.tenant_id, first.origin.digest, first.timeout_ns)
        return self._admission.admit_call(lengths, now_ns, applicant, was_checked=call is not None)

    def refusal(self, reason: str, now_ns: int) -> RequestError:
        """The error for whom something else than admission has no room for."""
        return self._admission.refusal(reason, now_ns)

    def add_probes(self, exporter: MetricsExporter, clock: Clock) -> None:
        """What a scrape shows of the door."""
        for name in self._classes:
            exporter.add_probe("headrace_predicted_wait_seconds", partial(self._predicted_wait, name, clock), name)
        exporter.add_probe("headrace_admission_promises", lambda: self.num_promises(clock.now_ns()))

    def _predicted_wait(self, service_class: str, clock: Clock) -> float:
        return self.predicted_wait_seconds(service_class, clock.now_ns())

    def predicted_wait_seconds(self, service_class: str, now_ns: int) -> float:
        """How long a newcomer of this class would wait for its prompt's computing; 0 when nothing was measured yet."""
        applicant = self._applicant(service_class, DEFAULT_TENANT, b"", 0)
        wait_ns = self._admission.predicted_wait_ns(1, now_ns, applicant)
        return 0.0 if wait_ns is None else wait_ns / 1e9

    def num_promises(self, now_ns: int) -> int:
        """Refused callers for whom a place is kept."""
        self._admission.promises.forget_expired(now_ns)
        return len(self._admission.promises)

    def _applicant(self, class_name: str, tenant: str, digest: bytes, timeout_ns: int) -> Applicant:
        return Applicant(self._classes.get(class_name, self._default_class), tenant, digest, timeout_ns)
