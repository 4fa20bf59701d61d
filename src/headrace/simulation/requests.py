"""One request of simulated traffic, and the prompt that stands for it.

Owns: SimulatedRequest, FinishedRequest. Runs in: simulator. Must not know: where requests come from, figures.
"""

import msgspec

from headrace.protocol.messages import GenerationRequest
from headrace.protocol.sampling import SamplingParams, StopConditions

VOCAB_SIZE = 1 << 62  # ids of tokens are numbers of requests and parts: nothing is ever embedded
_FIRST_PART_TOKEN = 1 << 48  # below: tokens of one request's own
_SAMPLING = SamplingParams(temperature=0.0)
REFUSED = "refused"


class SimulatedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What comes, and when. Times in nanoseconds since the simulation's start.

    Equal `parts` at equal places are equal prompt tokens, `part_tokens` for each; what a prompt is longer is its own.
    `output_tokens` is what it will produce, which nobody knows before; `max_tokens`, at least as much, is what it asks for.
    """

    index: int  # from 0, in order of `due_ns`
    due_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    service_class: str = "standard"
    tenant_id: str = "default"
    priority: int = 0
    timeout_ns: int = 0  # 0: none
    part_tokens: int = 0
    parts: tuple[int, ...] = ()

    @property
    def request_id(self) -> int:
        """Its number in the scheduler."""
        return self.index + 1

    def prompt_token_ids(self) -> list[int]:
        """The prompt: no two requests have equal tokens but for the parts that they share."""
        token_ids: list[int] = []
        for part in self.parts:
            if len(token_ids) >= self.prompt_tokens:
                break
            token_ids += [_FIRST_PART_TOKEN + part] * min(self.part_tokens, self.prompt_tokens - len(token_ids))
        token_ids += [self.request_id] * (self.prompt_tokens - len(token_ids))
        return token_ids

    def generation(self, arrival_ns: int) -> GenerationRequest:
        """As the worker gets it. It ends after `output_tokens`, which stand in the place of max_tokens."""
        return GenerationRequest(
            request_id=self.request_id,
            tenant_id=self.tenant_id,
            priority=self.priority,
            prompt_token_ids=self.prompt_token_ids(),
            sampling=_SAMPLING,
            stopping=StopConditions(max_tokens=self.output_tokens, ignore_eos=True),
            arrival_ns=arrival_ns,
            deadline_ns=arrival_ns + self.timeout_ns if self.timeout_ns else 0,
            cache_salt="",
            reply_ring=0,
            model_id="",
            service_class=self.service_class,
        )


class FinishedRequest(msgspec.Struct, kw_only=True):
    """What became of a request. Times in nanoseconds since the simulation's start; -1: it did not come to that."""

    request: SimulatedRequest
    reason: str  # a FinishReason's value, or "refused"
    arrival_ns: int  # of the last try
    end_ns: int
    num_tries: int = 1
    first_scheduled_ns: int = -1
    token_ns: list[int] = []  # of each output token
    num_cached_tokens: int = 0
    num_preemptions: int = 0
