"""The model behind --model, prepared and ready to be served.

Owns: ServedModel, progress on the terminal. Runs in: a child of the supervisor (so that what preparing needs in memory goes
with it), and in the CLI's own process for `headrace run` and `headrace prepare`. Must not know: graphs, file formats.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from headrace.launch.settings import ModelSettings, Settings
from headrace.protocol.errors import ModelError
from headrace.protocol.manifest import Manifest

SIMULATED_PREFIX = "sim:"


class ServedModel(msgspec.Struct, frozen=True):
    """A prepared folder. `simulated`: the parameters after "sim:", None for a real model."""

    folder: str
    manifest: Manifest
    simulated: str | None = None

    @property
    def default_name(self) -> str:
        """The id for clients when the operator gives none. A simulated model does not pass for the real one."""
        return self.manifest.name if self.simulated is None else "sim"


class PrepareOutcome(msgspec.Struct, frozen=True):
    """What the preparing child prints on its standard output."""

    model: ServedModel | None = None
    error: str | None = None


def cache_folder(settings: ModelSettings) -> Path:
    """Where prepared models are kept."""
    from headrace.models.prepare import default_cache_dir

    return Path(settings.cache_dir).expanduser() if settings.cache_dir else default_cache_dir()


def prepare_model(settings: Settings) -> ServedModel:
    """Prepare in this process, with progress on standard error when it takes long. Raises ModelError with the reason."""
    from headrace.models.prepare import load_manifest, prepare, prepare_tokenizer_only, resolve_source

    told = settings.model.model
    cache_dir = cache_folder(settings.model)
    with TerminalProgress(told or "the embedded model") as progress:
        if told is not None and told.startswith(SIMULATED_PREFIX):
            folder = prepare_tokenizer_only(cache_dir=cache_dir, progress=progress.show)
            return ServedModel(str(folder), load_manifest(folder), told.removeprefix(SIMULATED_PREFIX))
        folder = prepare(resolve_source(told), cache_dir=cache_dir, precision=settings.model.precision, progress=progress.show)
    return ServedModel(str(folder), load_manifest(folder))


async def prepare_in_child(settings: Settings) -> ServedModel:
    """Prepare in a process of its own, which ends when this is cancelled. Raises ModelError with the reason."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headrace.launch.prepare_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate(msgspec.json.encode(settings))
    finally:
        if process.returncode is None:
            process.kill()  # what it leaves is a partial folder that the next one starts anew
            await process.wait()
    try:
        outcome = msgspec.json.decode(output, type=PrepareOutcome)
    except msgspec.DecodeError:
        raise ModelError(
            f"preparing the model ended with status {process.returncode} (out of memory, or interrupted?)"
        ) from None
    if outcome.model is None:
        raise ModelError(outcome.error or "preparing the model failed without a reason")
    return outcome.model


class TerminalProgress:
    """Says what preparing does: a bar on a terminal, else a line for each stage. Silent when all is there already."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, stage: str, share: float) -> None:
        """`share` of the stage is done (0..1)."""
        if not self._console.is_terminal:
            if stage != self._stage:
                self._console.print(
                    f"Preparing {self._what} (once): {stage} ...", highlight=False, markup=False, soft_wrap=True
                )
            self._stage = stage
            return
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        assert self._task is not None
        self._bar.update(self._task, completed=share, description=f"Preparing {self._what} (once): {stage}")
