"""What the worker child is given on its standard input.

Owns: WorkerLaunch. Runs in: supervisor (writes), worker (reads). Must not know: the gateway (nor import it).
"""

import msgspec

from headrace.launch.model import ServedModel
from headrace.launch.settings import Settings
from headrace.worker.config import WorkerConfig


class WorkerLaunch(msgspec.Struct, frozen=True):
    """The worker's own configuration, and from what to build its executor."""

    worker: WorkerConfig
    settings: Settings
    model: ServedModel
