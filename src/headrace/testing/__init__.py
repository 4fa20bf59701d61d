"""Fakes that tests import: manual clock, executor with checked memory, in-memory channels."""
