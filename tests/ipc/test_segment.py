"""Segments: what they are called, who may have them, and that only orphans are removed."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from headrace.ipc import segment as segment_module
from headrace.ipc.segment import Segment, find_orphans, new_instance, remove_orphans, segment_folder
from headrace.protocol.errors import ConfigurationError


@pytest.fixture
def create(tmp_path):
    made = []

    def make(role="event_0", size_bytes=4096, instance="abcd"):
        made.append(Segment.create(role, size_bytes, instance=instance, folder=tmp_path))
        return made[-1]

    yield make
    for segment in made:
        segment.close()


def abandon(segment):
    """What a SIGKILL leaves: the file, and no lock."""
    segment.close()
    return segment


def test_a_segment_is_private_zeroed_named_and_shared(create, tmp_path):
    segment = create(size_bytes=5000)
    assert segment.name == f"headrace-abcd-{os.getpid()}-event_0"
    status = (tmp_path / segment.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert segment.size_bytes == status.st_size == 5000
    assert bytes(segment.buffer) == bytes(5000)
    other = Segment.attach(segment.name, tmp_path)
    segment.buffer[4999] = 7
    assert other.buffer[4999] == 7
    other.close()
    other.close()
    assert segment.buffer[4999] == 7


def test_two_of_one_name_are_an_error(create):
    create()
    with pytest.raises(FileExistsError):
        create()


def test_mappings_outlive_the_file(create, tmp_path):
    segment = create()
    other = Segment.attach(segment.name, tmp_path)
    segment.unlink()
    segment.unlink()
    assert list(tmp_path.iterdir()) == []
    segment.buffer[0] = 9
    assert other.buffer[0] == 9
    other.close()
    with pytest.raises(FileNotFoundError):
        Segment.attach(segment.name, tmp_path)


@pytest.mark.parametrize(
    "name", ["../passwd", "headrace-abcd-1-../x", "headrace-abcd-1-", "other-abcd-1-x", "headrace-xyz-1-x"]
)
def test_names_that_are_no_segments(name, tmp_path):
    with pytest.raises(ValueError, match="not a segment name"):
        Segment.attach(name, tmp_path)


def test_attaching_follows_no_link(create, tmp_path):
    target = create()
    link = tmp_path / "headrace-abcd-1-link"
    link.symlink_to(tmp_path / target.name)
    with pytest.raises(OSError, match="symbolic"):
        Segment.attach(link.name, tmp_path)


def test_no_room_is_an_error_for_the_operator_and_leaves_nothing(create, tmp_path, monkeypatch):
    def full(_fd, _offset, _size):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ConfigurationError, match="--shm-size"):
        create()
    assert list(tmp_path.iterdir()) == []


def test_a_living_server_keeps_its_segments(create, tmp_path):
    segment = create()
    Segment.attach(segment.name, tmp_path).close()
    assert find_orphans(tmp_path) == remove_orphans(tmp_path) == []
    assert (tmp_path / segment.name).exists()


def test_orphans_are_found_and_removed_whatever_process_has_their_pid_now(create, tmp_path):
    """The pid in the name is this living process's own: only the lock counts."""
    living, dead = create("living"), abandon(create("dead", 8192))
    found = find_orphans(tmp_path)
    assert [(orphan.name, orphan.pid, orphan.size_bytes) for orphan in found] == [(dead.name, os.getpid(), 8192)]
    assert (tmp_path / dead.name).exists()
    assert remove_orphans(tmp_path) == found
    assert remove_orphans(tmp_path) == []
    assert os.listdir(tmp_path) == [living.name]


def test_attached_processes_keep_no_orphan_alive(create, tmp_path):
    segment = create()
    attached = Segment.attach(segment.name, tmp_path)
    abandon(segment)
    assert len(remove_orphans(tmp_path)) == 1
    attached.buffer[0] = 1
    attached.close()


def test_what_is_not_ours_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "headrace-abcd-1-folder").mkdir()
    (tmp_path / "headrace-abcd-1-dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "headrace-abcd-1-pipe")
    (tmp_path / "notes.txt").write_text("x")
    assert remove_orphans(tmp_path) == []
    (tmp_path / "headrace-abcd-1-foreign").write_text("x")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_orphans(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 5


def test_a_remover_between_creation_and_lock_is_survived(tmp_path, monkeypatch):
    """The new file has no lock for a moment: a remover takes it for an orphan, and the creator makes another."""
    real_flock = segment_module.fcntl.flock
    removed = []

    def flock(fd, operation):
        if operation == segment_module.fcntl.LOCK_EX and not removed:
            monkeypatch.setattr(segment_module.fcntl, "flock", real_flock)
            removed.extend(remove_orphans(tmp_path))
        return real_flock(fd, operation)

    monkeypatch.setattr(segment_module.fcntl, "flock", flock)
    segment = Segment.create("x", 4096, instance="abcd", folder=tmp_path)
    assert len(removed) == 1
    assert (tmp_path / segment.name).exists()
    assert remove_orphans(tmp_path) == []
    segment.close()


def test_defaults():
    assert segment_folder().is_dir()
    assert new_instance() != new_instance()


CREATOR = """
import sys, time
from pathlib import Path
from headrace.ipc.segment import Segment
segment = Segment.create("ring", 4096, instance="beef", folder=Path(sys.argv[1]))
print(segment.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_server_leaves_an_orphan_and_a_running_one_does_not(tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-c", CREATOR, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        name = server.stdout.readline().strip()
        assert remove_orphans(tmp_path) == []
        server.send_signal(signal.SIGKILL)
        server.wait(30)
    assert [(orphan.name, orphan.pid) for orphan in remove_orphans(tmp_path)] == [(name, server.pid)]
