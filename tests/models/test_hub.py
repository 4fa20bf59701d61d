"""The Hub is asked for the files that preparing needs and no others; what it cannot give is told with the way out."""

import json
from pathlib import Path

import pytest

from headrace.models import hub
from headrace.models.prepare import load_manifest, prepare, resolve_source
from headrace.protocol.errors import ModelError
from tests.models.tiny_models import make, write_huggingface


class FakeHub:
    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self.files = files
        self.downloads: list[list[str]] = []

    def list_files(self, repository: str, revision: str | None) -> list[str]:
        assert (repository, revision) == ("owner/model", "v1")
        return self.files

    def download(self, repository: str, revision: str | None, files: list[str]) -> Path:
        assert set(files) <= set(self.files)
        self.downloads.append(files)
        return self.folder


def test_a_ready_ir_is_preferred_and_nothing_else_fetched(tmp_path: Path) -> None:
    files = ["openvino_model.xml", "openvino_model.bin", "config.json", "model.safetensors", "README.md", "tokenizer.json"]
    client = FakeHub(tmp_path, files)
    assert hub.fetch("owner/model@v1", client) == tmp_path
    assert client.downloads == [["config.json", "tokenizer.json", "openvino_model.xml", "openvino_model.bin"]]


def test_safetensors_are_fetched_after_the_architecture_was_checked(tmp_path: Path) -> None:
    folder = write_huggingface(tmp_path / "m", make("llama"))
    client = FakeHub(folder, ["config.json", "model.safetensors", "original/weights.safetensors", "pytorch_model.bin"])
    assert hub.fetch("owner/model@v1", client) == folder
    assert client.downloads == [["config.json"], ["config.json", "model.safetensors"]]


def test_an_unsupported_architecture_is_refused_before_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    client = FakeHub(tmp_path, ["config.json", "model.safetensors"])
    with pytest.raises(ModelError, match=r"gemma3.*optimum-cli export openvino --model owner/model DIR"):
        hub.fetch("owner/model@v1", client)
    assert client.downloads == [["config.json"]]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin", "config.json"], "optimum-cli export openvino --model owner/model DIR"),
        (["m.Q4_0.gguf"], "download the one"),
    ],
)
def test_what_cannot_be_served_as_it_is_names_the_way(files: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        hub.fetch("owner/model@v1", FakeHub(tmp_path, files))


def test_a_fetched_model_is_prepared_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_huggingface(tmp_path / "snapshots" / "0123abcd", make("llama"))
    monkeypatch.setattr(hub, "_Hub", lambda: FakeHub(folder, ["config.json", "model.safetensors"]))
    prepared = prepare(resolve_source("owner/model@v1"), cache_dir=tmp_path / "cache")
    assert (load_manifest(prepared).name, load_manifest(prepared).source) == ("model", "owner/model@v1")


def test_an_unreachable_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no route")

    def nothing_cached(*_: object, **__: object) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no snapshot")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_cached)
    with pytest.raises(ModelError, match=r"cannot be reached.*\.gguf file"):
        hub.fetch("owner/model")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: ["openvino_model.xml", "openvino_model.bin"])
    with pytest.raises(ModelError, match=r"cannot be reached"):  # lost between the two questions
        hub.fetch("owner/model")


def test_what_an_earlier_run_fetched_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    folder = write_huggingface(tmp_path / "m", make("llama"))

    def fail(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert hub.fetch("owner/model") == folder


def test_a_missing_or_gated_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
        raise huggingface_hub.errors.RepositoryNotFoundError("gone", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(ModelError, match="HF_TOKEN"):
        hub.fetch("owner/model")
