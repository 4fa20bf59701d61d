"""Builds the executor for a served model.

Owns: the choice of the executor's class. Runs in: worker, and `headrace run`. Must not know: how a step is computed.
"""

import re
from pathlib import Path

from headrace.launch.memory import available_bytes, pool_blocks, total_bytes
from headrace.launch.model import ServedModel
from headrace.launch.settings import Settings
from headrace.protocol.ports import Executor

WORD = re.compile(rb" [a-z]{2,12}")  # what a simulated model says
MAX_WORDS = 4096


def build_executor(settings: Settings, model: ServedModel) -> Executor:
    """Load the model. Raises ConfigurationError and ModelError with the reason."""
    if model.simulated is not None:
        return _simulated(model)
    return _openvino(settings, model)


def _openvino(settings: Settings, model: ServedModel) -> Executor:
    from headrace.executors.openvino_paged import OpenVINOExecutor
    from headrace.models.prepare import load_graph
    from headrace.protocol.graph import BLOCK_SIZE

    manifest = model.manifest

    def num_blocks(bytes_per_block: int) -> int:
        return pool_blocks(
            settings.cache,
            bytes_per_block=bytes_per_block,
            block_size=BLOCK_SIZE,
            max_model_len=min(settings.scheduler.max_model_len or manifest.max_model_len, manifest.max_model_len),
            max_num_seqs=settings.scheduler.max_num_seqs,
            available=available_bytes(),
            total=total_bytes(),
        )

    executor: Executor = OpenVINOExecutor.open(
        lambda: load_graph(Path(model.folder)),
        manifest,
        num_blocks=num_blocks,
        kv_precision=settings.cache.kv_cache_precision,
        compute_precision=settings.model.compute_precision,
        quantize_activations=settings.model.quantize_activations,
        max_num_threads=settings.operation.threads,
    )
    return executor


def _simulated(model: ServedModel) -> Executor:
    from headrace.executors.simulated import SimulatedExecutor
    from headrace.protocol.graph import TOKENIZER_FILE
    from headrace.text.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.from_file(Path(model.folder) / TOKENIZER_FILE)
    vocabulary = ((token_id, tokenizer.token_bytes(token_id)) for token_id in range(model.manifest.vocab_size))
    words = [token_id for token_id, word in vocabulary if WORD.fullmatch(word)][:MAX_WORDS]
    return SimulatedExecutor.from_spec(model.simulated or "", model.manifest, words)


def describe_executor(executor: Executor) -> str:
    """The operator's line about a loaded model."""
    spec = executor.spec
    num_tokens = spec.num_blocks * spec.block_size
    return f"{spec.kv_format}, KV pool of {spec.num_blocks} blocks ({num_tokens} tokens)"
