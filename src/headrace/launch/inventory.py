"""`headrace models`: what is prepared.

Owns: the listing. Runs in: CLI. Must not know: how a model is prepared.
"""

import json
import sys
from collections.abc import Sequence

from headrace.launch.model import cache_folder
from headrace.launch.settings import Settings
from headrace.models.prepare import list_prepared


def print_models(settings: Settings, as_json: bool) -> None:
    """A table, or JSON lines' worth of facts in one array."""
    folder = cache_folder(settings.model)
    prepared = list_prepared(folder)
    if as_json:
        facts = [
            {
                "name": model.manifest.name,
                "folder": str(model.folder),
                "size_bytes": model.size_bytes,
                "architecture": model.manifest.architecture,
                "precision": model.manifest.precision,
                "max_model_len": model.manifest.max_model_len,
                "source": model.manifest.source,
            }
            for model in prepared
        ]
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    if not prepared:
        sys.stdout.write(f"Nothing is prepared in {folder} yet. `headrace prepare` prepares the embedded model.\n")
        return
    rows = [("name", "precision", "architecture", "context", "MiB", "folder")]
    for model in prepared:
        manifest = model.manifest
        facts_row = (manifest.name, manifest.precision, manifest.architecture, str(manifest.max_model_len))
        rows.append((*facts_row, f"{model.size_bytes / 2**20:.0f}", str(model.folder)))
    sys.stdout.write("".join(line + "\n" for line in _aligned(rows)))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their longest cell, the last one free: no name or path is broken, however narrow the terminal."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
