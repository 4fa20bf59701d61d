"""Headrace: an LLM inference server. docs/ARCHITECTURE.md explains the whole in one page."""

import sys

__version__ = "0.1.0"

# `import openvino` by itself sends an event to its maker and writes files under ~/intel; its only switches are a file in the
# user's home and signs of a CI machine. An import that finds None here fails, and OpenVINO then takes its own silent stand-in.
# It has to be said before the first import of openvino, whichever module does it: hence here.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # None is allowed: Python reference, 5.3.1
