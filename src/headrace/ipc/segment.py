"""Shared-memory segments as memory-mapped files, and the removal of those that a killed server left behind.

Owns: segment files, their names and locks. Runs in: supervisor (creates), gateway and worker (attach). Must not know: contents.
The creator holds an flock for its life: an orphan is a file whose lock is free, whoever has its process id today.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.protocol.errors import ConfigurationError

_SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - files in it are created O_EXCL, 0600, never followed
_NAME = re.compile(r"headrace-(?P<instance>[0-9a-f]{1,32})-(?P<pid>[0-9]{1,10})-(?P<role>[a-z0-9_]{1,40})")


def new_instance() -> str:
    """A short random hex name for one server, shared by all of its segments."""
    return secrets.token_hex(4)


def segment_folder() -> Path:
    """Where segments live: /dev/shm where it exists and can be written, else the folder for temporary files."""
    if _SHARED_MEMORY_FOLDER.is_dir() and os.access(_SHARED_MEMORY_FOLDER, os.W_OK | os.X_OK):
        return _SHARED_MEMORY_FOLDER
    return Path(tempfile.gettempdir())


class Segment:
    """One mapped file. `buffer` is the memory; close what looks into it (rings, pages) before the segment itself.

    Start child processes by exec, not by a bare fork: a forked copy of the creator would share its lock.
    """

    def __init__(self, path: Path, buffer: mmap.mmap, lock_fd: int | None) -> None:
        self._path = path
        self._lock_fd = lock_fd
        self.buffer = buffer

    @classmethod
    def create(cls, role: str, size_bytes: int, *, instance: str, folder: Path | None = None) -> "Segment":
        """A new zeroed segment named headrace-<instance>-<pid>-<role>, locked by this process.

        Raises FileExistsError when this process has one of that name, ConfigurationError when there is no room for it.
        """
        name = f"headrace-{instance}-{os.getpid()}-{role}"
        path = _path_of(name, folder)
        fd = _open_locked(path)
        try:
            _reserve(fd, size_bytes, path)
            buffer = mmap.mmap(fd, size_bytes)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(path, buffer, fd)

    @classmethod
    def attach(cls, name: str, folder: Path | None = None) -> "Segment":
        """The segment that another process created. Raises FileNotFoundError when it is gone, ValueError for a foreign name."""
        path = _path_of(name, folder)
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return cls(path, mmap.mmap(fd, os.fstat(fd).st_size), None)
        finally:
            os.close(fd)

    @property
    def name(self) -> str:
        """What `attach` takes."""
        return self._path.name

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return len(self.buffer)

    def unlink(self) -> None:
        """Remove the file; mappings stay valid. No error when it is gone already."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap, and give up the lock if this is the creator. Idempotent. Raises BufferError while a view of it is open."""
        self.buffer.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


@dataclass(frozen=True, slots=True)
class Orphan:
    """A segment whose creator is gone. `pid`: the process that it had."""

    name: str
    pid: int
    size_bytes: int


def find_orphans(folder: Path | None = None) -> list[Orphan]:
    """This user's segments that no living server holds, by name."""
    return _sweep(folder, remove=False)


def remove_orphans(folder: Path | None = None) -> list[Orphan]:
    """Remove them and say which. Never touches a living server's; two removers at once share the work."""
    return _sweep(folder, remove=True)


def _sweep(folder: Path | None, *, remove: bool) -> list[Orphan]:
    folder = folder or segment_folder()
    found = []
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        size_bytes = _size_if_orphan(folder / name, remove=remove)
        if size_bytes is not None:
            found.append(Orphan(name, int(match["pid"]), size_bytes))
    return found


def _size_if_orphan(path: Path, *, remove: bool) -> int | None:
    """The file's size when its lock is free (and it was removed, if asked), else None."""
    try:
        # O_NONBLOCK: the folder is open to all users, so the name may be a pipe that somebody put there.
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # gone meanwhile, another user's, or no plain file
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.fstat(fd).st_nlink == 0:
            return None  # another remover had it
        if remove:
            path.unlink(missing_ok=True)  # under the lock, see _open_locked
        return status.st_size
    finally:
        os.close(fd)


def _open_locked(path: Path) -> int:
    """Create the file and lock it. A remover that slips in between unlinks under the lock, so that it shows afterwards."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # a remover holds it for moments only
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _reserve(fd: int, size_bytes: int, path: Path) -> None:
    """Give the file its size and its memory now: a full /dev/shm must be an error here, not a SIGBUS at the first write."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConfigurationError(
            f"No room for {size_bytes} bytes of shared memory in {path.parent}: {error.strerror}. "
            "Make it larger (in a container: --shm-size) or free some of it."
        ) from error


def _path_of(name: str, folder: Path | None) -> Path:
    if not _NAME.fullmatch(name):
        raise ValueError(f"not a segment name: {name!r}")
    return (folder or segment_folder()) / name
