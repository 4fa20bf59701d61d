"""Why a request did not get on: one vocabulary for scheduler, gateway, metrics and timelines.

Owns: StallCause, Stall. Runs in: worker and gateway. Must not know: how a cause is found.
"""

import enum

import msgspec


class StallCause(enum.Enum):
    """What a request waited for. The value is the label in metrics and the word in timelines."""

    WORKER_BUSY = "worker_busy"  # arrived, and the step that was running had not ended yet
    NO_SLOT = "no_slot"  # before its first step: as many sequences ran as may (max_num_seqs)
    NO_BLOCKS = "no_blocks"  # before its first step: the KV pool had no room for its prompt
    NO_BUDGET = "no_budget"  # before its first step, or in its prefill: the steps' tokens went to requests before it
    PREFILL = "prefill"  # between tokens: steps were long because prompts of others were computed in them
    SLOW_STEP = "slow_step"  # between tokens: steps were long though they held few prompt tokens
    PREEMPTED = "preempted"  # its memory was taken for others, and its tokens were computed again
    SLOW_READER = "slow_reader"  # its client, or the network to it, did not take what was ready
    WORKER_LOST = "worker_lost"  # the model's process died


class Stall(msgspec.Struct, frozen=True, array_like=True):
    """One wait that was longer than the threshold. Times are CLOCK_MONOTONIC nanoseconds."""

    cause: StallCause
    began_ns: int
    duration_ns: int
