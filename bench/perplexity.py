"""What preparing costs in quality: perplexity and agreement of prepared models with the file's own weights in float32.

    python bench/perplexity.py                       # the default model
    python bench/perplexity.py --model FILE.gguf --window 512

The reference is our own graph at precision f32 with f32 KV storage: the file's weights, dequantized, not rounded again (the
tests compare that graph with a plain numpy forward pass). The text is what every machine with Python has, in a fixed choice:
licences and a module of the standard library. Each window starts anew; its first token is not predicted. Prints Markdown.
Exit status 1 when the last precision asked for is more than 1 % worse than the reference.
"""

import argparse
import importlib.metadata
import importlib.util
import pathlib
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov

from headrace.executors.openvino_paged import device_properties
from headrace.models.prepare import default_cache_dir, load_graph, load_manifest, prepare, resolve_source
from headrace.protocol import graph as names

LICENCE_CHARACTERS, SOURCE_CHARACTERS = 14_000, 9_000
MAX_LOSS = 0.01
WINDOW_CHUNK_TOKENS = 128  # logits of so many tokens at a time: bounds memory


class PagedModel:
    """One sequence at a time through a compiled paged graph."""

    def __init__(self, folder: pathlib.Path, *, kv_precision: Any, compute_precision: Any, num_blocks: int) -> None:
        self.manifest = load_manifest(folder)
        settings = device_properties(
            self.manifest, kv_precision=kv_precision, compute_precision=compute_precision, quantize_activations=True
        )
        self._request = ov.Core().compile_model(load_graph(folder), "CPU", settings).create_infer_request()
        self._blocks = np.arange(num_blocks, dtype=np.int32)
        for port in self._request.model_inputs:
            name = port.get_any_name()
            if name.startswith((names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX)):
                shape = [num_blocks, *[size.get_length() for size in list(port.get_partial_shape())[1:]]]
                self._request.set_tensor(name, ov.Tensor(port.get_element_type(), shape))

    def step(self, ids: list[int], past: int, wanted: list[int]) -> dict[str, Any]:
        """Compute `ids` after `past` tokens; views of the outputs for the tokens `wanted`, good until the next step."""
        end = past + len(ids)
        num_blocks = -(-end // names.BLOCK_SIZE)
        inputs = {
            names.INPUT_IDS: np.array(ids, np.int64),
            names.POSITION_IDS: np.arange(past, end, dtype=np.int64),
            names.PAST_LENS: np.array([past], np.int32),
            names.SUBSEQUENCE_BEGINS: np.array([0, len(ids)], np.int32),
            names.BLOCK_INDICES: self._blocks[:num_blocks],
            names.BLOCK_INDICES_BEGINS: np.array([0, num_blocks], np.int32),
            names.MAX_CONTEXT_LEN: np.array(end, np.int32),
            names.SAMPLED_TOKENS_INDICES: np.array(wanted, np.int32),
        }
        for name, value in inputs.items():
            self._request.set_tensor(name, ov.Tensor(value))
        self._request.infer()
        outputs = (names.LOGITS, names.TOP_INDICES, names.LOG_NORMALIZER)
        return {name: self._request.get_tensor(name).data for name in outputs}


@dataclass(frozen=True)
class Scores:
    """Over all predicted tokens, in order."""

    losses: np.ndarray  # negative log likelihood of each
    best: np.ndarray  # the most likely token at each
    seconds: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))


def texts() -> dict[str, str]:
    """The fixed text. Python's own licence, and the argument parser's source."""
    root = pathlib.Path(argparse.__file__).parent
    licence = next(path for path in (root / "LICENSE.txt", root / "LICENSE") if path.is_file()).read_text(encoding="utf-8")
    source = (root / "argparse.py").read_text(encoding="utf-8")
    return {"licence": licence[:LICENCE_CHARACTERS], "source": source[:SOURCE_CHARACTERS]}


def windows(prepared: pathlib.Path, size: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prepared / names.TOKENIZER_FILE))
    found = []
    for text in texts().values():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found += [ids[start : start + size] for start in range(0, len(ids), size)]
    return [window for window in found if len(window) > 1]


def score(model: PagedModel, rows: list[list[int]]) -> Scores:
    losses, best = [], []
    start = time.perf_counter()
    for row in rows:
        for past in range(0, len(row), WINDOW_CHUNK_TOKENS):
            part = row[past : past + WINDOW_CHUNK_TOKENS]
            targets = row[past + 1 : past + 1 + len(part)]
            outputs = model.step(part, past, list(range(len(targets))))
            chosen = outputs[names.LOGITS][np.arange(len(targets)), 0, targets].astype(np.float64)
            losses.append(outputs[names.LOG_NORMALIZER][:, 0, 0] - chosen)
            best.append(outputs[names.TOP_INDICES][:, 0, 0].copy())
    return Scores(np.concatenate(losses), np.concatenate(best), time.perf_counter() - start)


def genai_folder(
    source: pathlib.Path, prepared: pathlib.Path, work: pathlib.Path, cache_dir: pathlib.Path
) -> pathlib.Path | None:
    """openvino-genai's own preparation of the same GGUF, taken as a ready IR; None when that package is not here."""
    if importlib.util.find_spec("openvino_genai") is None or source.suffix != ".gguf":
        return None
    import json
    import shutil

    import openvino_genai

    folder = work / "genai"
    folder.mkdir(parents=True, exist_ok=True)
    gguf = folder / "model.gguf"
    shutil.copy(source, gguf)
    openvino_genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True)
    gguf.unlink()
    shutil.copy(prepared / names.TOKENIZER_FILE, folder)
    manifest = load_manifest(prepared)
    config = {"model_type": manifest.architecture, "max_position_embeddings": manifest.max_model_len}
    (folder / "config.json").write_text(json.dumps(config))
    return prepare(resolve_source(str(folder)), cache_dir=cache_dir)


def table(rows: list[tuple[str, Scores]], reference: Scores) -> str:
    lines = ["| weights, KV storage | perplexity | to float32 | top-1 agreement | tokens/s |", "|---|---|---|---|---|"]
    for name, scores in rows:
        worse = scores.perplexity / reference.perplexity - 1
        agreement = float((scores.best == reference.best).mean())
        speed = len(scores.losses) / scores.seconds
        lines.append(f"| {name} | {scores.perplexity:.3f} | {worse:+.2%} | {agreement:.4f} | {speed:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for headrace serve; by default the packaged model")
    parser.add_argument(
        "--precisions", default="f16,int8-group,int8", help="to compare with f32; the last one is held to the limit"
    )
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument(
        "--work-dir", type=pathlib.Path, help="for openvino-genai's preparation, when that package is installed"
    )
    parser.add_argument("--cache-dir", type=pathlib.Path, default=default_cache_dir())
    options = parser.parse_args()
    source = resolve_source(options.model)
    num_blocks = -(-options.window // names.BLOCK_SIZE)

    def scored(folder: pathlib.Path, kv_precision: str, compute_precision: str = "f32") -> Scores:
        model = PagedModel(folder, kv_precision=kv_precision, compute_precision=compute_precision, num_blocks=num_blocks)
        return score(model, rows)

    exact = prepare(source, cache_dir=options.cache_dir, precision="f32")
    rows = windows(exact, options.window)
    reference = scored(exact, "f32")
    found = [("f32, f32 (reference)", reference), ("f32, u8", scored(exact, "u8"))]
    for precision in options.precisions.split(","):
        folder = prepare(source, cache_dir=options.cache_dir, precision=precision)
        found += [(f"{precision}, {kv}", scored(folder, kv)) for kv in ("f32", "u8")]
    loss = found[-1][1].perplexity / reference.perplexity - 1
    found.append((f"{precision}, u8, computed in bf16", scored(folder, "u8", "bf16")))
    if options.work_dir and (genai := genai_folder(source.path, exact, options.work_dir, options.cache_dir)):
        version = importlib.metadata.version("openvino-genai")
        found.append((f"openvino-genai {version} GGUF reader, u8", scored(genai, "u8")))
    print(f"{source.name}, {len(reference.losses)} tokens in windows of {options.window}, OpenVINO {ov.get_version()}\n")
    print(table(found, reference))
    if loss > MAX_LOSS:
        print(f"\n{precision}, u8 is {loss:.2%} worse than float32; the limit is {MAX_LOSS:.0%}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
