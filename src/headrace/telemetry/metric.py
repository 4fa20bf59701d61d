"""What one family of metrics is: its name, type, unit, labels and buckets, and where its values come from.

Owns: Metric, the buckets, the stages of a step. Runs in: everywhere. Must not know: how values are kept or shown.
"""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The Prometheus type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(enum.Enum):
    """Who fills it."""

    GATEWAY = "gateway"  # an accumulator of GatewayMeters
    WORKER = "worker"  # fields of the status page
    PROBE = "probe"  # asked when scraped (MetricsExporter.add_probe)


class Reading(enum.Enum):
    """How a gauge of the worker follows from the status page. Counters and histograms are added up over its lives."""

    FIELD = "field"  # as it stands there
    IS_READY = "is_ready"  # 1 when the worker is ready
    USED_SHARE = "used_share"  # blocks that are neither free nor only cached, by all blocks
    MILLIONTHS = "millionths"  # a ratio, which the page holds as an integer
    NANOSECONDS = "nanoseconds"  # shown in seconds
    IS_CAUSE = "is_cause"  # 1 at the label whose place in StallCause the field tells


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `buckets` are upper bounds in the unit that is shown; the last one, infinity, is not written.

    Accumulators, status page and probes of counters count integers: nanoseconds where the unit is seconds, else the unit
    itself. `field` names the status page's field, or the beginning of a histogram's fields; "{value}" and "{index}" in it
    stand for the label's value and its place among the label's values.
    """

    name: str
    kind: Kind
    source: Source
    help: str
    unit: str = ""
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()  # beside model_name
    field: str = ""
    reading: Reading = Reading.FIELD
    worker_value: str = ""  # of a probed counter: the label's value that the status page's field stands for
    is_of_model: bool = True  # carries the label model_name


# 1 ms to 5 minutes; close together where tokens come.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(1 << exponent) for exponent in range(18))
ROW_BUCKETS = tuple(float(1 << exponent) for exponent in range(11))
# Stages of a step: 20 us to 10 s, coarse, because each bucket is a place on the status page.
STAGE_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 10.0)
# Ages of KV blocks: 10 ms to an hour.
BLOCK_AGE_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)

STEP_STAGES = ("receive", "schedule", "execute_other", "forward", "sample", "apply", "publish")
