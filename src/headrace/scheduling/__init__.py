"""Which tokens the next step computes. Pure: no I/O, no device; time is an argument."""

from headrace.scheduling.config import SchedulerConfig
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.statistics import SchedulerStatistics

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerStatistics"]
