"""Measure any OpenAI-compatible server from outside: load, figures, studies, reports, and the audit. Speaks public protocols only."""
