"""Headrace: an LLM inference server. docs/ARCHITECTURE.md explains the whole in one page."""

__version__ = "0.1.0"
