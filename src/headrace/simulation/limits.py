"""What a simulation can count with: the range of each setting, of a record's numbers, and of simulated time.

Owns: Range, RANGES, the checks against them. Runs in: simulator, CLI. Must not know: options, files.

Times are nanoseconds in 64 bits. Requests come within MAX_SECONDS; the time to serve them all may take it to MAX_END_NS.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headrace.protocol.errors import ConfigurationError

MAX_REQUESTS = 1_000_000
MAX_SECONDS = 1_000_000_000  # some 31 years
MAX_END_NS = 4_000_000_000 * 1_000_000_000
MAX_WINDOWS = 1_000_000  # over which fairness is judged
MAX_SPELLS = 10_000_000  # bursts and pauses that are drawn, those of all tenants together
MIN_SHARE = 1e-6  # of a class or tenant, of all
MAX_STEP_SECONDS = 1000  # that each term of a step's time may take
_SCALES = 1e-6, 1e6
_MAX_US = MAX_SECONDS * 1_000_000
_MAX_COUNT = 1_000_000_000_000


class Range(NamedTuple):
    """Both ends are allowed. Whole numbers are for a count."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"between {_shown(self.low)} and {_shown(self.high)}"


RANGES: Mapping[str, Range] = {
    # what comes
    "num_requests": Range(1, MAX_REQUESTS),
    "duration_seconds": Range(1e-3, float(MAX_SECONDS)),
    "rate": Range(*_SCALES),
    "load": Range(1e-3, 1e3),
    "rate_scale": Range(*_SCALES),
    "length_scale": Range(*_SCALES),
    "shared_prefix_tokens": Range(0, 1_000_000),
    "max_tokens": Range(1, 1_000_000),
    "timeout_seconds": Range(1e-3, float(MAX_SECONDS)),
    "burst_on_seconds": Range(1e-3, 1e6),
    "burst_off_seconds": Range(1e-3, 1e6),
    "seed": Range(0, 2**53),
    # the server
    "max_num_seqs": Range(1, 100_000),
    "max_num_batched_tokens": Range(1, 10_000_000),
    "max_model_len": Range(2, 10_000_000),
    "num_blocks": Range(1, 1_000_000),
    "block_size": Range(1, 1_000_000),
    "max_queued_requests": Range(0, 1_000_000_000),
    "max_queued_prompt_tokens": Range(1, _MAX_COUNT),
    "min_chunk_tokens": Range(1, 1_000_000),
    "class_aging_seconds": Range(0.1, float(MAX_SECONDS)),
    # its steps
    "step_ms": Range(0.0, MAX_STEP_SECONDS * 1e3),
    "row_us": Range(0.0, MAX_STEP_SECONDS * 1e6),
    "token_us": Range(0.0, MAX_STEP_SECONDS * 1e6),
    "kv_ns": Range(0.0, MAX_STEP_SECONDS * 1e9),
    "between_us": Range(0.0, MAX_STEP_SECONDS * 1e6),
    # how it is judged
    "max_tries": Range(1, 1000),
    "ttft_ms": Range(1e-3, MAX_SECONDS * 1e3),
    "tbt_ms": Range(1e-3, MAX_SECONDS * 1e3),
    "warm_up_seconds": Range(0.0, float(MAX_SECONDS)),
    "window_seconds": Range(1e-3, float(MAX_SECONDS)),
}

RECORD_RANGES: Mapping[str, Range] = {
    "at_us": Range(-_MAX_US, _MAX_US),
    "timeout_us": Range(0, _MAX_US),
    "queue_us": Range(-1, _MAX_US),
    "ttft_us": Range(-1, _MAX_US),
    "last_token_us": Range(-1, _MAX_US),
    "duration_us": Range(0, MAX_STEP_SECONDS * 1_000_000),
    "prompt_tokens": Range(0, _MAX_COUNT),
    "max_tokens": Range(0, _MAX_COUNT),
    "output_tokens": Range(0, _MAX_COUNT),
    "cached_tokens": Range(0, _MAX_COUNT),
    "decode_rows": Range(0, _MAX_COUNT),
    "prefill_tokens": Range(0, _MAX_COUNT),
    "context_tokens": Range(0, _MAX_COUNT),
}


def check_range(name: str, value: float, allowed: Range, where: str = "") -> None:
    """ConfigurationError, in words for the user, for what is outside or no number."""
    if not allowed.low <= value <= allowed.high:
        raise ConfigurationError(f"{where}{name} must be {allowed}, not {_shown(value)}.")


def check_shares(name: str, shares: Mapping[str, float]) -> None:
    """Shares of one whole: positive, and none so small that its first request never comes. Raises ConfigurationError."""
    if not all(0 < share < float("inf") for share in shares.values()):
        raise ConfigurationError(f"the shares of {name} must be positive numbers.")
    least = MIN_SHARE * sum(shares.values())
    if small := [key for key, share in shares.items() if share < least]:
        raise ConfigurationError(f"the share of {', '.join(small)} is below {MIN_SHARE:.6f} of all {name}.")


def nanoseconds_due(at_seconds: float, number: int, where: str, advice: str) -> int:
    """When request `number` (from 1) is due. ConfigurationError where that is too far away to be counted in nanoseconds."""
    if not 0 <= at_seconds <= MAX_SECONDS:
        raise ConfigurationError(
            f"{where}request {number} would come {at_seconds:.6g} s after the start; it must be "
            f"{Range(0, MAX_SECONDS)}: {advice}."
        )
    return round(at_seconds * 1e9)


def _shown(value: float) -> str:
    return str(int(value)) if abs(value) < 1e18 and value == int(value) else f"{value:g}"
