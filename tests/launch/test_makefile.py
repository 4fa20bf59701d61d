"""What `make` says about an installation before it makes one."""

import pathlib
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path):
    """A copy in which uv is there and nothing is installed."""
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "uv").touch()
    return tmp_path


def said(project, target):
    command = ["make", "--dry-run", target]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=30, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "Installing" in line)
    return line


def test_the_size_is_that_of_what_is_installed(project):
    assert "serve.txt into .venv (once; about 420 MB on disk)" in said(project, "serve")
    assert "dev.txt into .venv (once; about 630 MB on disk)" in said(project, "setup")


def test_after_another_set_only_what_is_missing_is_installed(project):
    (project / ".venv" / "serve.stamp").touch()
    assert "dev.txt into .venv (what is not there yet)" in said(project, "setup")
