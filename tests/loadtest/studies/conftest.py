"""Tests of studies ask what is run and what is said of it; intervals of single figures have their own tests."""

import pytest

from headrace.loadtest import statistics


@pytest.fixture(autouse=True)
def _no_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand resamples for each of hundreds of paper runs would be most of the time of these tests."""
    monkeypatch.setattr(statistics, "bootstrap_intervals", lambda *_, **__: {})
