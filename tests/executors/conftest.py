"""The prepared default model, for tests that load it."""

from pathlib import Path

import openvino as ov
import pytest

from headrace.models.prepare import load_graph, prepare, resolve_source
from headrace.models.prepared_folder import default_cache_dir, load_manifest
from headrace.protocol.manifest import Manifest


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """Prepared once into the user's cache; at once if it was there."""
    return prepare(resolve_source(None), cache_dir=default_cache_dir(), progress=lambda text, share: None)


@pytest.fixture(scope="session")
def default_manifest(default_model_folder: Path) -> Manifest:
    return load_manifest(default_model_folder)


@pytest.fixture
def default_graph(default_model_folder: Path) -> ov.Model:
    return load_graph(default_model_folder)
