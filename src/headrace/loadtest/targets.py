"""Named goodput targets: a limit on TTFT and one on worst-10% TBT.

Owns: GoodputTarget, the built-in names, how a target is written. Runs in: load tool. Must not know: requests, figures.
"""

import math

import msgspec


class GoodputTarget(msgspec.Struct, kw_only=True, frozen=True):
    """A request is good when its TTFT and its worst-10% TBT are both within these."""

    name: str
    ttft_seconds: float
    tbt_seconds: float


# MLPerf Inference's limits for Llama 3.1 8B (mlperf.conf, server and interactive scenarios).
MLPERF = GoodputTarget(name="mlperf", ttft_seconds=2.0, tbt_seconds=0.100)
MLPERF_INTERACTIVE = GoodputTarget(name="mlperf-interactive", ttft_seconds=0.5, tbt_seconds=0.030)
DEFAULT_TARGETS: tuple[GoodputTarget, ...] = (MLPERF, MLPERF_INTERACTIVE)
NAMED_TARGETS: dict[str, GoodputTarget] = {target.name: target for target in DEFAULT_TARGETS}


def parse_target(text: str) -> GoodputTarget:
    """A built-in name, TTFT:TBT in milliseconds ("800:60"), or the same with a name of one's own ("chat=800:60").

    Raises ValueError for anything else.
    """
    if text in NAMED_TARGETS:
        return NAMED_TARGETS[text]
    name, _, limits = text.rpartition("=")
    ttft, colon, tbt = limits.partition(":")
    try:
        ttft_ms, tbt_ms = float(ttft), float(tbt)
    except ValueError:
        ttft_ms = tbt_ms = math.nan
    if not colon or not (0 < ttft_ms < math.inf and 0 < tbt_ms < math.inf):
        names = ", ".join(NAMED_TARGETS)
        raise ValueError(f"target {text!r}: give {names}, or TTFT:TBT in milliseconds such as 800:60, or NAME=800:60")
    return GoodputTarget(name=name or limits, ttft_seconds=ttft_ms / 1000, tbt_seconds=tbt_ms / 1000)
