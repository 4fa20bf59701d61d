"""Who joins the batch, and who gives way for it.

Owns: Joining. Runs in: worker, tests, simulation.
Must not know: what a step computes, devices.
"""

import math

from headrace.kvcache import KVCacheManager
from headrace.protocol.lifecycle import RequestState
from headrace.protocol.stalls import StallCause
from headrace.scheduling.claims import prefer_cached
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.placement import Placement
from headrace.scheduling.policy import JoinPolicy
from headrace.scheduling.preemption import choose_victims
from headrace.scheduling.sequence import Sequence

KEPT_PART = 16  # at most this part of places and memory is kept for light accounts
MIN_SEQS_TO_KEEP = 8  # with fewer places none is kept
KEPT_PER_ACCOUNT = 2  # so that the next one of the same account need not wait for a place either
USUAL_WINDOW = 32  # prompts over which their usual length is averaged


class Joining:
    """Admits those that wait, in order of their claims, while places, prefill budget and memory last.

    A sequence joins with memory for all its tokens, and only if every running one could still get a block afterwards: without
    that reserve an admission would be undone by the next preemption. Where places or memory are full, sequences of strictly
    lower claims give way.

    Equal claims never give way. So that an account that seldom asks need not wait for one of a busy account's streams to end,
    some places are kept free for those light accounts that asked not long ago, with memory for a usual prompt each; and a light
    account's newcomer passes a head that cannot join, while its account has no more than its share of the places. It pays as
    all do: its counter rises, and the others have their turn when it is light no more. What is kept is at most a sixteenth of
    all, and nothing while only one account asks, while nobody runs or while strictly lower claims could give way.
    """

    def __init__(
        self,
        policy: JoinPolicy,
        blocks: KVCacheManager,
        live: LiveSequences,
        placement: Placement,
        *,
        min_chunk_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._policy = policy
        self._blocks = blocks
        self._live = live
        self._placement = placement
        self._min_chunk_tokens = min_chunk_tokens
        self._max_num_seqs = max_num_seqs
        self._max_num_kept = max_num_seqs // KEPT_PART or int(max_num_seqs >= MIN_SEQS_TO_KEEP)
        self._usual_num_blocks = 0.0  # of a newcomer's prompt
        self._in_vain: tuple[int, int, int] | None = None  # for whom all lower claims together were not enough, and among whom

    def admit(self, budget_tokens: int, now_ns: int) -> StallCause | None:
        """Let sequences join. `budget_tokens`: most prefill tokens of the step. Returns what was at its end."""
        waiting = self._live.waiting
        while (sequence := waiting.head()) is not None:
            blocked_by = self._admit(sequence, budget_tokens, now_ns)
            if blocked_by is None:
                continue
            light = None if self._is_under_share(sequence) else waiting.first_of(self._is_under_share)
            if light is None or self._admit(light, budget_tokens, now_ns) is not None:
                return blocked_by
        return None

    def _admit(self, sequence: Sequence, budget_tokens: int, now_ns: int) -> StallCause | None:
        """Let it join, or one that is preferred to it. What keeps it from joining; None if nothing does."""
        running, num_waiting = self._live.running, len(self._live.waiting)
        if not self._has_budget(sequence, budget_tokens):
            return StallCause.NO_BUDGET
        num_kept = self._num_kept(sequence, now_ns)
        if self._policy.num_may_join(num_running=len(running) + num_kept, num_waiting=num_waiting, now_ns=now_ns) > 0:
            if sequence is self._live.waiting.head() and not self._is_under_share(sequence):
                sequence = self._preferred(now_ns) or sequence
        elif not self._make_way(sequence, now_ns):
            return StallCause.NO_SLOT
        return None if self._try(sequence, num_kept, now_ns) else StallCause.NO_BLOCKS

    def _is_under_share(self, sequence: Sequence) -> bool:
        return self._live.is_under_share(sequence, self._max_num_seqs)

    def _num_kept(self, sequence: Sequence, now_ns: int) -> int:
        """How many places it must leave free."""
        live = self._live
        if not self._max_num_kept or not len(live.running) or sequence.state is not RequestState.WAITING:
            return 0
        if self._has_lower(sequence) or self._is_under_share(sequence):
            return 0
        return min(
            self._max_num_kept, KEPT_PER_ACCOUNT * live.num_light_expected(sequence.claim.level, now_ns, self._max_num_kept)
        )

    def _has_budget(self, sequence: Sequence, budget_tokens: int) -> bool:
        """Whether the step could compute a chunk of it beside those of all prompts that do not stand below it.

        Who could not get one would hold memory in vain. When no such prompt runs, it may join in any case. Prompts of accounts
        that are not light stand below a light account's.
        """
        level, min_chunk = sequence.claim.level, self._min_chunk_tokens
        is_light = self._live.is_light
        is_preferred = is_light(sequence)
        num_tokens = 0
        for other in self._live.running:
            num_remaining = other.num_remaining_tokens
            other_level = other.claim.level
            if num_remaining > 1 and (other_level < level or (other_level == level and (not is_preferred or is_light(other)))):
                num_tokens += min(num_remaining, min_chunk)
        if not num_tokens:
            return True
        num_cached_blocks = len(self._blocks.match(sequence.table, sequence.token_ids))
        num_own_tokens = len(sequence.token_ids) - num_cached_blocks * self._blocks.block_size
        return num_tokens + min(num_own_tokens, min_chunk) <= budget_tokens

    def _preferred(self, now_ns: int) -> Sequence | None:
        """Of those whose turn it is, the one with the longest cached prefix."""
        candidates = self._live.waiting.candidates(now_ns)
        if len(candidates) < 2:
            return None
        return prefer_cached(candidates, lambda candidate: len(self._blocks.match(candidate.table, candidate.token_ids)))

    def _try(self, sequence: Sequence, num_kept: int, now_ns: int) -> bool:
        """Memory for it, if need be taken from lower claims. `num_kept`: prompts for which it must leave memory."""
        running, placement = self._live.running, self._placement
        num_kept_blocks = min(math.ceil(num_kept * self._usual_num_blocks), self._blocks.num_blocks // KEPT_PART)
        is_newcomer = sequence.state is RequestState.WAITING
        has_joined = placement.join(sequence, len(running) + num_kept_blocks, now_ns) or (
            self._make_way(sequence, now_ns) and placement.join(sequence, len(running), now_ns)
        )
        if has_joined and is_newcomer:
            self._usual_num_blocks += (len(sequence.table.block_ids) - self._usual_num_blocks) / USUAL_WINDOW
        return has_joined

    def _has_lower(self, sequence: Sequence) -> bool:
        running = self._live.running
        return len(running) > 0 and running[-1].claim.level > sequence.claim.level

    def _make_way(self, sequence: Sequence, now_ns: int) -> bool:
        """Preempt as many strictly lower claims as it takes for a place and memory, or nobody. Whether anybody was."""
        running, blocks = self._live.running, self._blocks
        key = (sequence.request_id, sequence.claim.level, self._live.num_changes)
        if not self._has_lower(sequence) or self._in_vain == key:
            return False
        num_missing = blocks.num_missing_blocks(sequence.table, sequence.token_ids, len(running))
        victims = choose_victims(
            running, sequence.claim.level, num_missing, lambda other: blocks.num_released_blocks(other.table, sequence.table)
        )
        if not victims:
            # The sum of what is free and what the lower ones hold stays, until others run: that walk is not made in each step.
            self._in_vain = key
        for victim in victims:
            self._placement.preempt(victim, now_ns, by_claim=True)
        return bool(victims)
