"""Prepares a model: `python -m headrace.launch.prepare_child`, settings as JSON on stdin, the outcome on stdout.

Owns: this process' entry point. Runs in: a child of the supervisor. Must not know: how preparing is done.
"""

import sys

import msgspec

from headrace.launch.model import PrepareOutcome, prepare_model
from headrace.launch.settings import Settings
from headrace.protocol.errors import HeadraceError


def main() -> int:
    """0 when the model is prepared."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)
    try:
        outcome = PrepareOutcome(model=prepare_model(settings))
    except HeadraceError as error:
        outcome = PrepareOutcome(error=error.message)
    except KeyboardInterrupt:
        outcome = PrepareOutcome(error="interrupted")
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    sys.stdout.buffer.flush()
    return 0 if outcome.model is not None else 1


if __name__ == "__main__":
    sys.exit(main())
