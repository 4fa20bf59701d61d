"""The scheduler's numbers and what they must satisfy.

Owns: SchedulerConfig. Runs in: worker, launch, tests, simulation.
Must not know: where the numbers come from.
"""

from dataclasses import dataclass

from headrace.protocol.errors import ConfigurationError


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

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 2), ("priority_aging_ns", 0)):
            if getattr(self, name) < low:
                raise ConfigurationError(f"{name} must be at least {low}, not {getattr(self, name)}.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "every running sequence gets one token in each step."
            )
