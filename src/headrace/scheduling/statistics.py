"""What the scheduler counts.

Owns: SchedulerStatistics, and the counters it is made of. Runs in: worker, tests, simulation.
Must not know: metric names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.kvcache import KVCacheStatistics
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.stalls import StallCause
from headrace.scheduling.live import LiveSequences
from headrace.scheduling.prefill_budget import PrefillBudget


@dataclass(slots=True)
class Counters:
    """Counts since the start; they only grow. Written by the scheduler."""

    num_started: int = 0  # requests taken by add, those that it ends at once included, duplicates not
    num_duplicates: int = 0  # adds dropped because their id was live
    num_steps: int = 0  # plans with rows
    num_prompt_tokens: int = 0  # computed for the first time
    num_cached_prompt_tokens: int = 0  # found in the prefix cache instead
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # computed again after a preemption
    num_padding_tokens: int = 0  # positions computed in vain, as executors tell
    num_claim_preemptions: int = 0  # of num_preemptions: in favour of a strictly higher claim
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """A snapshot: gauges of now, blocks, and the counters since the start."""

    num_running: int
    num_waiting: int  # preempted ones included
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_evictions: int
    num_steps: int
    num_started: int
    num_duplicates: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_padding_tokens: int
    num_claim_preemptions: int
    num_finished: Mapping[FinishReason, int]
    num_running_by_class: tuple[int, ...]  # by index in TrafficPolicy.classes
    num_waiting_by_class: tuple[int, ...]
    step_time_error_ratio: float  # mean relative error of the step-time model over the last steps
    step_time_predicted_ns: int  # of the last step
    step_time_target_ns: int  # the tightest TBT target of the last step's streams; 0: none
    blocked_by: StallCause | None  # what keeps the next waiting sequence from joining; None when nobody waits

    @classmethod
    def of(
        cls,
        live: LiveSequences,
        blocked_by: StallCause | None,
        blocks: KVCacheStatistics,
        counters: Counters,
        prefill: PrefillBudget,
    ) -> "SchedulerStatistics":
        """Put the parts together; later counting does not change the snapshot."""
        num_waiting = len(live.waiting)
        return cls(
            num_running=len(live.running),
            num_waiting=num_waiting,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_used_blocks=blocks.num_used_blocks,
            num_prefix_query_tokens=blocks.num_prefix_query_tokens,
            num_prefix_hit_tokens=blocks.num_prefix_hit_tokens,
            num_evictions=blocks.num_evictions,
            num_steps=counters.num_steps,
            num_started=counters.num_started,
            num_duplicates=counters.num_duplicates,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_prompt_tokens=counters.num_cached_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_preemptions=counters.num_preemptions,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_padding_tokens=counters.num_padding_tokens,
            num_claim_preemptions=counters.num_claim_preemptions,
            num_finished=dict(counters.num_finished),
            num_running_by_class=tuple(live.num_running_by_class),
            num_waiting_by_class=tuple(live.num_waiting_by_class),
            step_time_error_ratio=prefill.model.error_ratio,
            step_time_predicted_ns=prefill.predicted_ns,
            step_time_target_ns=prefill.target_ns,
            blocked_by=blocked_by if num_waiting else None,
        )
