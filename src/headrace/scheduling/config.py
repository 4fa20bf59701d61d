"""The scheduler's numbers and what they must satisfy.

Owns: SchedulerConfig, and the limits that follow from it. Runs in: worker, launch, tests, simulation.
Must not know: where the numbers come from.
"""

from dataclasses import dataclass, field
from typing import Literal

from headrace.protocol.errors import ConfigurationError
from headrace.protocol.messages import WorkerLimits
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.traffic import TrafficPolicy
from headrace.scheduling.claims import ClaimRules


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a request. Raises ConfigurationError when they cannot work together."""

    max_num_seqs: int  # most sequences that hold memory and run at once
    max_num_batched_tokens: int  # token budget of one step
    max_model_len: int  # most tokens (prompt + output) of one sequence; the executor's own limits may be lower
    enable_prefix_caching: bool = True
    # One level of priority is worth so much waiting: a request gives way to better ones that arrive within this time after it,
    # and then stands before all later ones, so that low priority gets its turn under steady load.
    priority_aging_ns: int = 60_000_000_000
    traffic: TrafficPolicy = field(default_factory=TrafficPolicy)
    policy: Literal["headrace", "fcfs"] = "headrace"  # fcfs: by arrival alone, whatever class, tenant and priority
    class_aging_ns: int = 30_000_000_000  # least wait for which a request stands one level higher; see ClaimRules
    step_time_budget: bool = True  # prefill is cut so that steps keep the TBT targets of the streams in them
    min_chunk_tokens: int = 64  # a prompt gets at least so many tokens of a step, or none
    stall_threshold_ns: int = 250_000_000  # who does not get on for so long has stalled

    def __post_init__(self) -> None:
        least = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2}
        for name, low in (
            *least.items(),
            ("priority_aging_ns", 0),
            ("stall_threshold_ns", 1),
            ("class_aging_ns", 1),
            ("min_chunk_tokens", 1),
        ):
            if getattr(self, name) < low:
                raise ConfigurationError(f"{name} must be at least {low}, not {getattr(self, name)}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence gets one token in each step."
            )


def claim_rules_of(config: SchedulerConfig) -> ClaimRules:
    """How requests' claims are made."""
    return ClaimRules(
        config.traffic,
        aging_ns=config.class_aging_ns,
        priority_aging_ns=config.priority_aging_ns,
        is_fcfs=config.policy == "fcfs",
        ages_by_target=True,
    )


def limits_of(config: SchedulerConfig, spec: ExecutorSpec) -> WorkerLimits:
    """What a request may ask: max_model_len is the least of configuration, model and pool.

    Raises ConfigurationError when not even a prompt token and an output token would fit.
    """
    max_model_len = min(config.max_model_len, spec.max_model_len, spec.num_blocks * spec.block_size)
    if max_model_len < 2:
        raise ConfigurationError(
            f"The KV pool ({spec.num_blocks} blocks of {spec.block_size} tokens) or the model's context "
            f"({spec.max_model_len} tokens) cannot hold a prompt token and an output token."
        )
    return WorkerLimits(spec.vocab_size, max_model_len, config.max_num_seqs, spec.num_blocks, spec.block_size)
