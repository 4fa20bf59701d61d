"""Command line: flags in, processes started, answers printed."""

from headrace.cli.main import main

__all__ = ["main"]
