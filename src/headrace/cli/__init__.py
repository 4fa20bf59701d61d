"""Command line: flags in, processes started, answers printed."""
