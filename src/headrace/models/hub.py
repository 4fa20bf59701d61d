"""Fetches from the Hugging Face Hub the files of a model that preparing needs, and no others.

Owns: the huggingface_hub package. Runs in: launch, before serving. Must not know: what is done with the files.
"""

import re
from pathlib import Path
from typing import Protocol

from headrace.models.architecture import config_from_huggingface
from headrace.models.huggingface_folder import read_json
from headrace.protocol.errors import ModelError

SMALL_FILES = ("*.json", "*.jinja")
IR_FILES = ("openvino_model.xml", "openvino_model.bin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,95})?")


class HubClient(Protocol):
    """The two questions that are put to the Hub. Both raise ModelError when it cannot answer."""

    def list_files(self, repository: str, revision: str | None) -> list[str]:
        """Paths of all files."""
        ...

    def download(self, repository: str, revision: str | None, patterns: list[str]) -> Path:
        """A local folder with the files whose path matches a pattern."""
        ...


def is_hub_id(text: str) -> bool:
    """True for owner/name, with @revision or without."""
    return HUB_ID.fullmatch(text) is not None and ".." not in text


def fetch(model: str, client: HubClient | None = None) -> Path:
    """The local folder of a model: a ready OpenVINO IR where the repository has one, else safetensors that we can prepare.

    Raises ModelError when the Hub cannot be reached, has no such model, or the model must be converted first.
    """
    repository, _, revision = model.partition("@")
    client = client or _Hub()
    files = [name for name in client.list_files(repository, revision or None) if "/" not in name]
    if all(name in files for name in IR_FILES):
        return client.download(repository, revision or None, [*SMALL_FILES, *IR_FILES])
    if "config.json" in files and any(name.endswith(".safetensors") for name in files):
        small = client.download(repository, revision or None, list(SMALL_FILES))
        try:
            config_from_huggingface(read_json(small / "config.json"), f"{repository}/config.json")
        except ModelError as error:  # known before gigabytes are fetched
            raise ModelError(f"{error.message} {_conversion(repository)}") from error
        return client.download(repository, revision or None, [*SMALL_FILES, "*.safetensors"])
    if any(name.endswith(".gguf") for name in files):
        raise ModelError(f"{repository} holds .gguf files: download the one you want and name its path.")
    raise ModelError(f"{repository} holds no model that can be served as it is. {_conversion(repository)}")


def _conversion(repository: str) -> str:
    command = f"optimum-cli export openvino --model {repository} DIR"
    return f"Convert it first: pip install 'optimum[openvino]' && {command}; then name DIR."


class _Hub:
    """The real one. What an earlier run fetched serves when the Hub cannot be reached."""

    def list_files(self, repository: str, revision: str | None) -> list[str]:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return list(HfApi().list_repo_files(repository, revision=revision))
        except (HfHubHTTPError, OSError, RuntimeError) as error:
            if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
                raise _refused(repository, error) from error
            unreachable = error
        try:
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, OSError):
            raise _unreachable(repository, unreachable) from unreachable
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def download(self, repository: str, revision: str | None, patterns: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))


def _refused(repository: str, error: Exception) -> ModelError:
    return ModelError(
        f"the Hub has no model {repository} that you may read ({type(error).__name__}); check the name, or set HF_TOKEN when "
        "it is private or gated."
    )


def _unreachable(repository: str, error: Exception) -> ModelError:
    return ModelError(
        f"{repository}: the Hugging Face Hub cannot be reached ({type(error).__name__}) and nothing of the model was fetched "
        "before. Name a local folder or a .gguf file instead, or set HF_ENDPOINT to a mirror."
    )
