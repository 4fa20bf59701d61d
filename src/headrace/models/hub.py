"""Fetches from the Hugging Face Hub the files of a model that preparing needs, and no others.

Owns: the huggingface_hub package. Runs in: launch, before serving. Must not know: what is done with the files.
"""

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from headrace.models.architecture import config_from_huggingface
from headrace.models.huggingface_folder import read_json
from headrace.protocol.errors import ModelError

SMALL_FILES = ("*.json", "*.jinja")
IR_FILES = ("openvino_model.xml", "openvino_model.bin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,95})?")
REFUSALS = (401, 403, 404)
Answer = TypeVar("Answer")


class HubClient(Protocol):
    """The two questions that are put to the Hub. Both raise ModelError when it cannot answer."""

    def list_files(self, repository: str, revision: str | None) -> list[str]:
        """Paths of all files."""
        ...

    def download(self, repository: str, revision: str | None, files: list[str]) -> Path:
        """A local folder with these files."""
        ...


def is_hub_id(text: str) -> bool:
    """True for owner/name, with @revision or without."""
    return HUB_ID.fullmatch(text) is not None and ".." not in text


def fetch(model: str, client: HubClient | None = None) -> Path:
    """The local folder of a model: a ready OpenVINO IR where the repository has one, else safetensors that we can prepare.

    Raises ModelError when the Hub cannot be reached, has no such model, or the model must be converted first.
    """
    repository, _, named = model.partition("@")
    revision = named or None
    client = client or _Hub()
    files = [name for name in client.list_files(repository, revision) if "/" not in name]
    small = [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in SMALL_FILES)]
    weights = [name for name in files if name.endswith(".safetensors")]
    if all(name in files for name in IR_FILES):
        return client.download(repository, revision, [*small, *IR_FILES])
    if weights and "config.json" in files:
        folder = client.download(repository, revision, small)
        try:
            config_from_huggingface(read_json(folder / "config.json"), f"{repository}/config.json")
        except ModelError as error:  # known before gigabytes are fetched
            raise ModelError(f"{error.message} {_conversion(repository)}") from error
        return client.download(repository, revision, [*small, *weights])
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
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return list(_asked(repository, lambda: HfApi().list_repo_files(repository, revision=revision)))
        except _UnreachableError as unreachable:
            try:
                folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
            except (LocalEntryNotFoundError, OSError):
                raise unreachable from None
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def download(self, repository: str, revision: str | None, files: list[str]) -> Path:
        from huggingface_hub import snapshot_download

        return Path(_asked(repository, lambda: snapshot_download(repository, revision=revision, allow_patterns=files)))


class _UnreachableError(ModelError):
    """No answer, as opposed to a refusal."""


def _asked(repository: str, question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except Exception as error:  # the kinds depend on the transport that the package uses; none may escape unread
        kind = type(error).__name__
        if getattr(getattr(error, "response", None), "status_code", None) in REFUSALS:
            raise ModelError(
                f"the Hub has no model {repository} that you may read ({kind}); check the name, or set HF_TOKEN when it is "
                "private or gated."
            ) from error
        raise _UnreachableError(
            f"{repository}: the Hugging Face Hub cannot be reached ({kind}). Name a local folder or a .gguf file instead, "
            "or set HF_ENDPOINT to a mirror."
        ) from error
