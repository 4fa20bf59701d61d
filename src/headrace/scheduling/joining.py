"""Who joins the batch, and who gives way for it.

Owns: Joining. Runs in: worker, tests, simulation.
Must not know: what a step computes, devices.
"""

from headrace.kvcache import KVCacheManager
from headrace.protocol.stalls import StallCause
from headrace.scheduling.claims import prefer_cached
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.placement import Placement
from headrace.scheduling.policy import JoinPolicy
from headrace.scheduling.preemption import choose_victims
from headrace.scheduling.sequence import Sequence


class Joining:
    """Admits those that wait, in order of their claims, while places, prefill budget and memory last.

    A sequence joins with memory for all its tokens, and only if every running one could still get a block afterwards: without
    that reserve an admission would be undone by the next preemption. Where places or memory are full, sequences of strictly
    lower claims give way.
    """

    def __init__(
        self,
        policy: JoinPolicy,
        blocks: KVCacheManager,
        live: LiveSequences,
        placement: Placement,
        *,
        min_chunk_tokens: int,
    ) -> None:
        self._policy = policy
        self._blocks = blocks
        self._live = live
        self._placement = placement
        self._min_chunk_tokens = min_chunk_tokens
        self._in_vain: tuple[int, int, int] | None = None  # for whom all lower claims together were not enough, and among whom

    def admit(self, budget_tokens: int, now_ns: int) -> StallCause | None:
        """Let sequences join. `budget_tokens`: most prefill tokens of the step. Returns what was at its end."""
        running, waiting = self._live.running, self._live.waiting
        while (sequence := waiting.head()) is not None:
            if not self._has_budget(sequence, budget_tokens):
                return StallCause.NO_BUDGET
            if self._policy.num_may_join(num_running=len(running), num_waiting=len(waiting), now_ns=now_ns) > 0:
                sequence = self._preferred(now_ns) or sequence
            elif not self._make_way(sequence, now_ns):
                return StallCause.NO_SLOT
            if not self._try(sequence, now_ns):
                return StallCause.NO_BLOCKS
        return None

    def _has_budget(self, sequence: Sequence, budget_tokens: int) -> bool:
        """Whether the step could compute a chunk of it beside those of all prompts that do not stand below it.

        Who could not get one would hold memory in vain. When no such prompt runs, it may join in any case.
        """
        level, min_chunk = sequence.claim.level, self._min_chunk_tokens
        num_tokens = 0
        for other in self._live.running:
            num_remaining = other.num_remaining_tokens
            if num_remaining > 1 and other.claim.level <= level:
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

    def _try(self, sequence: Sequence, now_ns: int) -> bool:
        """Memory for it, if need be taken from lower claims."""
        running, placement = self._live.running, self._placement
        if placement.join(sequence, len(running), now_ns):
            return True
        return self._make_way(sequence, now_ns) and placement.join(sequence, len(running), now_ns)

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
