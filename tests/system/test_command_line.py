"""Commands that need no server, as processes of their own: what stands on standard output, and what is refused at once."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

QUESTION = ("--kv-cache-gib", "0.25", "--max-tokens", "16", "What is the capital of France?")


def headrace(*arguments, **variables):
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=110, check=False, stdin=subprocess.DEVNULL
    )


def test_run_prints_the_answer_and_nothing_else():
    done = headrace("run", "--stats", *QUESTION)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"The capital of France is Paris[^\n]*\n", done.stdout)  # one line; the model ends it as it likes
    assert done.stderr.count("tokens/s") == 1
    assert "at 0.0 tokens/s" not in done.stderr


def test_an_option_of_the_server_is_refused_by_run():
    done = headrace("run", "--record", "x", *QUESTION)
    assert (done.returncode, done.stdout) == (2, "")
    assert "It is an option of headrace serve." in done.stderr


def test_a_mistyped_variable_is_refused_by_serve():
    done = headrace("serve", HEADRACE_PROT="1")
    assert (done.returncode, done.stderr) == (
        1,
        "Error: environment: unknown variable HEADRACE_PROT (did you mean HEADRACE_PORT?)\n",
    )


def test_a_record_that_exists_is_refused_before_the_model_is_prepared(tmp_path):
    record = tmp_path / "record.jsonl"
    record.write_text("{}\n")
    done = headrace("serve", "--port", "0", "--cache-dir", str(tmp_path / "cache"), "--record", str(record))
    assert done.returncode == 1
    assert "never overwritten" in done.stderr
    assert not (tmp_path / "cache").exists()
