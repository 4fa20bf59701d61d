"""The cache of prepared models: where it lies, what is in it, and writing a folder once and whole.

Owns: the cache folder's layout and locks. Runs in: launch and cli. Must not know: how a model is prepared.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.protocol.errors import ModelError
from headrace.protocol.graph import MANIFEST_FILE
from headrace.protocol.manifest import FORMAT_VERSION, Manifest

MODELS_FOLDER = "models"
INDEX_FILE = ".sources.json"  # digests of sources seen before
MAX_INDEX_ENTRIES = 256
HASH_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A prepared model in the cache."""

    folder: Path
    manifest: Manifest
    size_bytes: int


def default_cache_dir() -> Path:
    """HEADRACE_CACHE_DIR, or headrace/ in XDG_CACHE_HOME, or ~/.cache/headrace. Empty variables count as unset."""
    if own := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "headrace"
    return Path.home() / ".cache" / "headrace"


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder. Raises ModelError when it is missing, unreadable or of another format."""
    path = folder / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ModelError(f"{folder} is no prepared model: it holds no {MANIFEST_FILE}.") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); remove the folder to have the model prepared again.") from error
    if manifest.format_version != FORMAT_VERSION:
        raise ModelError(
            f"{folder} has format {manifest.format_version}, this version reads {FORMAT_VERSION}; prepare the model again."
        )
    return manifest


def list_prepared(cache_dir: Path) -> list[PreparedModel]:
    """What the cache holds, by folder name. Folders that are no sound prepared model are left out."""
    found = []
    parent = cache_dir / MODELS_FOLDER
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        with contextlib.suppress(ModelError, OSError):
            manifest = load_manifest(folder)
            found.append(PreparedModel(folder, manifest, sum(file.stat().st_size for file in folder.iterdir())))
    return found


def write_once(target: Path, fill: Callable[[Path], None], *, on_wait: Callable[[], None] = lambda: None) -> Path:
    """Make `target` with what `fill` writes into the empty folder it is given; at once when `target` is there already.

    Several processes may call this at once: one fills, the others wait (on_wait is called first) and find it done. The
    folder appears whole or not at all; what a crash leaves behind is removed by the next caller. Raises ModelError when
    the cache cannot be written.
    """
    if (target / MANIFEST_FILE).is_file():
        return target
    partial, lock = target.parent / f".{target.name}.partial", target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock, on_wait):
            if (target / MANIFEST_FILE).is_file():
                return target
            for leftover in (partial, target):  # a target without a manifest was damaged by hand
                if leftover.exists():
                    shutil.rmtree(leftover)
            partial.mkdir()
            try:
                fill(partial)
                _flush(partial)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise ModelError(f"the prepared model cannot be written to {target}: {error}") from error
    return target


def source_digest(files: Iterable[Path], cache_dir: Path, progress: Callable[[float], None]) -> str:
    """SHA-256 over names, sizes and bytes of a source's files. Remembered by path, size and time of change.

    Raises ModelError when a file cannot be read.
    """
    files = sorted(files)
    try:
        stamp = [[str(file.resolve()), (facts := file.stat()).st_size, facts.st_mtime_ns] for file in files]
        index_path = cache_dir / MODELS_FOLDER / INDEX_FILE
        index = _read_index(index_path)
        key = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()
        if (known := index.get(key)) is not None:
            return known
        digest = _digest(files, progress)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error
    _write_index(index_path, {**_read_index(index_path), key: digest})
    return digest


def _digest(files: list[Path], progress: Callable[[float], None]) -> str:
    total = sum(file.stat().st_size for file in files) or 1
    done = 0
    digest = hashlib.sha256()
    buffer = bytearray(HASH_CHUNK_BYTES)
    for file in files:
        digest.update(f"{len(file.name)}:{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb", buffering=0) as stream:
            while size := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:size])
                done += size
                progress(min(1.0, done / total))
    return digest.hexdigest()


def _read_index(path: Path) -> dict[str, str]:
    """Empty when missing or damaged: the index only saves time."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_index(path: Path, index: dict[str, str]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    recent = dict(list(index.items())[-MAX_INDEX_ENTRIES:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(recent))
        temporary.replace(path)
    except OSError as error:
        raise ModelError(f"the cache folder {path.parent} cannot be written: {error}") from error


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock for the block; it goes with the process, so a crash leaves none."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # the file stays: removing it would let two callers lock two files of one name


def _flush(folder: Path) -> None:
    """Bring the files to the disk before the rename makes them visible."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
