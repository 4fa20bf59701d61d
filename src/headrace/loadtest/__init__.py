"""Measure any OpenAI-compatible server from outside: load, figures, studies, reports, audit. Speaks public protocols only."""
