"""The one mutable object of a request.

Owns: Sequence. Written by the scheduler only. Runs in: worker, tests, simulation.
Must not know: its neighbours, blocks of others, devices.
"""

from headrace.kvcache import BlockTable
from headrace.protocol.errors import ErrorCode
from headrace.protocol.lifecycle import FinishReason, RequestState, check_transition
from headrace.protocol.messages import GenerationRequest, Usage, WorkerLimits
from headrace.scheduling.claims import Claim, Rank
from headrace.scheduling.stalls import Wait


class Sequence:
    """A request under way: its tokens, and how many of them are computed.

    There is no prefill and no decode: each step lets `num_computed_tokens` catch up with `token_ids`, and when the last token
    is computed a next one is drawn.
    """

    __slots__ = (
        "claim",
        "class_index",
        "first_scheduled_ns",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_ever_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "request",
        "request_id",
        "state",
        "stop_token_ids",
        "table",
        "token_ids",
        "wait",
        "was_planned",
    )

    def __init__(
        self,
        request: GenerationRequest,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        claim: Claim,
        class_index: int = 0,
    ) -> None:
        stopping = request.stopping
        self.request = request
        self.class_index = class_index  # in TrafficPolicy.classes
        self.wait = Wait()
        self.request_id = request.request_id
        self.state = RequestState.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.claim = claim
        self.max_tokens = min(self.num_prompt_tokens + stopping.max_tokens, max_model_len)  # of the whole sequence
        self.min_tokens = self.num_prompt_tokens + stopping.min_tokens  # of the whole sequence, the ending token left out
        own_stops = frozenset(stopping.stop_token_ids)
        self.stop_token_ids = own_stops if stopping.ignore_eos else own_stops | eos_token_ids
        self.table = BlockTable(request.cache_salt)
        self.num_computed_tokens = 0  # now in the KV storage
        self.num_ever_computed_tokens = 0  # most that ever were; below it a token is computed again
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when first scheduled
        self.num_preemptions = 0
        self.first_scheduled_ns = 0
        self.was_planned = False  # whether the executor has ever heard of it

    @property
    def rank(self) -> tuple[int, Rank]:
        """Of those that run, who has the smaller rank goes first, and gives way last when memory is short."""
        return self.claim.key

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens to compute until the next one can be drawn."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far; all of them were emitted."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def forbidden_token_ids(self) -> frozenset[int]:
        """What must not be drawn next, because it would end the sequence before min_tokens."""
        return self.stop_token_ids if len(self.token_ids) < self.min_tokens else frozenset()

    def move_to(self, state: RequestState) -> None:
        """Change state; RuntimeError for a step that the table of transitions lacks."""
        check_transition(self.state, state)
        self.state = state

    def why_it_cannot_run(self, limits: WorkerLimits) -> tuple[ErrorCode, str] | None:
        """Why it could never end well. The gateway refuses such requests at the door, so this is defence in depth."""
        if not self.num_prompt_tokens:
            return ErrorCode.INVALID_VALUE, "The prompt has no token."
        if self.num_prompt_tokens >= limits.max_model_len:
            message = (
                f"The prompt has {self.num_prompt_tokens} tokens; with one of output, {limits.max_model_len} are the most."
            )
            return ErrorCode.CONTEXT_LENGTH_EXCEEDED, message
        if min(self.token_ids) < 0 or max(self.token_ids) >= limits.vocab_size:
            return ErrorCode.INVALID_VALUE, f"The prompt has a token outside the vocabulary of {limits.vocab_size}."
        return None

    def start(self, num_cached_tokens: int, now_ns: int) -> int:
        """It runs (again), with KV for its first `num_cached_tokens` found.

        Returns how many prompt tokens that spares which were neither computed nor found before.
        """
        if self.state is RequestState.WAITING:
            self.first_scheduled_ns = now_ns
            self.num_cached_tokens = num_cached_tokens
        self.move_to(RequestState.RUNNING)
        num_found = min(num_cached_tokens, self.num_prompt_tokens) - self.num_ever_computed_tokens
        self.num_computed_tokens = num_cached_tokens
        self.num_ever_computed_tokens = max(self.num_ever_computed_tokens, num_cached_tokens)
        return max(0, num_found)

    def preempt(self) -> None:
        """Its memory is taken: nothing is computed any more."""
        self.move_to(RequestState.PREEMPTED)
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def advance(self, num_tokens: int) -> tuple[int, int]:
        """So many more tokens are computed.

        Returns how many of them were prompt tokens computed for the first time, and how many had been computed before.
        """
        before, known = self.num_computed_tokens, self.num_ever_computed_tokens
        now = before + num_tokens
        self.num_computed_tokens = now
        self.num_ever_computed_tokens = max(known, now)
        return max(0, min(now, self.num_prompt_tokens) - max(before, known)), max(0, min(now, known) - before)

    def append(self, token_id: int) -> FinishReason | None:
        """Take a drawn token. STOP: it is one that ends the sequence. LENGTH: it was the last there is room for."""
        num_tokens_before = len(self.token_ids)
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and num_tokens_before >= self.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens_before + 1 >= self.max_tokens else None

    def usage(self) -> Usage:
        """What it consumed so far."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )
