"""Fixtures of the HTTP surface's tests: no port, no process, no model."""

from collections.abc import Iterator

import pytest

from tests.http.fakes import Surface


@pytest.fixture
def surface() -> Iterator[Surface]:
    made = Surface()
    yield made
    made.app.close()
