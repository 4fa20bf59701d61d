"""`headrace models`: what is prepared.

Owns: the listing. Runs in: CLI. Must not know: how a model is prepared.
"""

import json
import sys

from rich.console import Console
from rich.table import Table

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
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "precision", "architecture", "context", "MiB", "folder"):
        table.add_column(heading, overflow="fold")
    for model in prepared:
        manifest = model.manifest
        facts_row = (manifest.name, manifest.precision, manifest.architecture, str(manifest.max_model_len))
        table.add_row(*facts_row, f"{model.size_bytes / 2**20:.0f}", str(model.folder))
    Console().print(table)
