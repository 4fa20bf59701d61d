"""Giving a sequence its place and its memory, and taking both.

Owns: Placement. Runs in: worker, tests, simulation.
Must not know: who is to join or to give way.
"""

from headrace.kvcache import KVCacheManager
from headrace.protocol.lifecycle import RequestState
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.outbox import EventOutbox
from headrace.scheduling.sequence import Sequence
from headrace.scheduling.stalls import StallWatch
from headrace.scheduling.statistics import Counters


class Placement:
    """The two moves between waiting and running, each with all that must be told of it."""

    def __init__(
        self, live: LiveSequences, blocks: KVCacheManager, stalls: StallWatch, counters: Counters, outbox: EventOutbox
    ) -> None:
        self._live = live
        self._blocks = blocks
        self._stalls = stalls
        self._counters = counters
        self._outbox = outbox

    def join(self, sequence: Sequence, num_spare_blocks: int, now_ns: int) -> bool:
        """Let a waiting sequence run, if there is memory for all its tokens and so many blocks more. Whether it does.

        Its account pays for the prompt once, when it first joins.
        """
        is_first = sequence.state is RequestState.WAITING
        num_cached_tokens = self._blocks.admit(
            sequence.table, sequence.token_ids, num_spare_blocks=num_spare_blocks, counts_query=is_first
        )
        if num_cached_tokens is None:
            return False
        self._live.admit(sequence, now_ns)
        if is_first:
            num_new = len(sequence.token_ids) - num_cached_tokens
            self._live.charge(sequence.claim, now_ns, num_prefill_tokens=num_new, num_cached_tokens=num_cached_tokens)
        self._counters.num_cached_prompt_tokens += sequence.start(num_cached_tokens, now_ns)
        self._stalls.admit(sequence.wait, now_ns)
        return True

    def preempt(self, sequence: Sequence, now_ns: int, *, by_claim: bool) -> None:
        """Take a running sequence's memory; its tokens are computed again later, but for what the prefix cache still has.

        `by_claim`: in favour of a strictly higher claim, not because the running ones outgrew memory.
        """
        sequence.preempt()
        self._live.preempt(sequence, now_ns, by_claim=by_claim)
        self._blocks.release(sequence.table)
        self._counters.num_preemptions += 1
        self._counters.num_claim_preemptions += by_claim
        self._stalls.preempt(sequence.wait, now_ns)
        self._outbox.put_preemption(sequence)
