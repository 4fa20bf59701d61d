"""Runs the paged graph on OpenVINO's CPU device: ragged rows over block tables, one inference for each step.

Owns: the compiled model, the KV storage and its request. Runs in: worker, one thread. Must not know: scheduling, model formats.
This is the home of `openvino` at run time; what the graph looks like is agreed in protocol/graph.py.
"""

import ctypes
import gc
import math
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.executors.layout import PagedInputs, PagedLayout
from headrace.executors.sampler import Sampler, Scores
from headrace.protocol import graph as names
from headrace.protocol.errors import ConfigurationError, ModelError
from headrace.protocol.manifest import Manifest
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.step import StepPlan, StepResult

KvPrecision = Literal["auto", "f32", "f16", "u8"]  # bf16 would need all arithmetic in bf16
ComputePrecision = Literal["f32", "bf16"]
# Activations that share a scale, for weights with one scale per output channel: a tenth faster than the plugin's 32, and
# perplexity is 0.83 % above float32 instead of 0.87 % (128 costs another half per cent). docs/lab.md has the table.
CHANNEL_ACTIVATION_GROUP = 64
# The plugin (5000) and oneDNN beneath it (1024) keep what they made for each shape they have met, and steps have as many shapes
# as their token budget: memory would grow for thousands of requests. Fewer cost no time that could be measured (docs/lab.md).
MAX_CACHED_KERNELS = 256
ONEDNN_CACHE_VARIABLE, MAX_CACHED_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", 64
BlockCount = int | Callable[[int], int]

_STEP_INPUTS = (
    names.INPUT_IDS,
    names.POSITION_IDS,
    names.PAST_LENS,
    names.SUBSEQUENCE_BEGINS,
    names.BLOCK_INDICES,
    names.BLOCK_INDICES_BEGINS,
    names.MAX_CONTEXT_LEN,
    names.SAMPLED_TOKENS_INDICES,
)
_OUTPUTS = (names.LOGITS, names.TOP_VALUES, names.TOP_INDICES, names.LOG_NORMALIZER)
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class _CachePort:
    """One key or value cache input: what a block of it holds."""

    name: str
    element_type: Any  # ov.Type
    block_shape: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in this tensor."""
        return math.prod(self.block_shape) * int(self.element_type.bitwidth) // 8


class OpenVINOExecutor:
    """An Executor over a compiled paged graph. Made by `open`."""

    def __init__(self, compiled: Any, manifest: Manifest, num_blocks: BlockCount) -> None:
        ports = _cache_ports(compiled)
        self.bytes_per_block = sum(port.bytes_per_block for port in ports)
        self.num_threads = int(compiled.get_property("INFERENCE_NUM_THREADS"))
        self._request = compiled.create_infer_request()
        self._step_ports = {name: compiled.input(name) for name in _STEP_INPUTS}
        self._output_ports = [compiled.output(name) for name in _OUTPUTS]
        self._storage: list[npt.NDArray[np.uint8]] = []  # the device's tensors do not keep it alive
        self._warm_up(compiled, ports, manifest)
        if callable(num_blocks):
            num_blocks = num_blocks(self.bytes_per_block)
        if num_blocks < 1:
            raise ConfigurationError(
                f"The KV pool has no room for one block: {self.bytes_per_block} bytes hold {names.BLOCK_SIZE} tokens. "
                "Give it more memory."
            )
        precisions = sorted({port.element_type.get_type_name() for port in ports})
        self._spec = ExecutorSpec(
            model_id=manifest.identity,
            kv_format=f"openvino-{'-'.join(precisions)}-{names.BLOCK_SIZE}",
            vocab_size=manifest.vocab_size,
            eos_token_ids=frozenset(manifest.eos_token_ids),
            max_model_len=manifest.max_model_len,
            block_size=names.BLOCK_SIZE,
            num_blocks=num_blocks,
        )
        self._sampler = Sampler(manifest.vocab_size)
        self._layout = PagedLayout(names.BLOCK_SIZE, num_blocks, manifest.vocab_size)
        self._allocate(compiled, ports, self._layout.num_storage_blocks)

    @classmethod
    def open(
        cls,
        graph: ov.Model | Callable[[], ov.Model],
        manifest: Manifest,
        *,
        num_blocks: BlockCount,
        kv_precision: KvPrecision = "auto",
        compute_precision: ComputePrecision = "f32",
        quantize_activations: bool = True,
        max_num_threads: int | None = None,
        pin_threads: bool = False,
    ) -> Self:
        """Compile the graph and make the KV storage. `graph` may be a function that makes it, so that nobody keeps it.

        `num_blocks`: how many blocks, or a function from the bytes of one block to that number; it is called when the model is
        in memory, so that it may look at what is free. `kv_precision` auto: what the device likes (u8 on a CPU).
        `compute_precision`: of all arithmetic; bf16 pays on CPUs with AMX, for prefill.
        `quantize_activations`: products with int8 weights take activations in int8 too, in groups (1.5 times as fast). It
        turns float32's last bits, which depend on whether a sequence's tokens come one or several in a step, into differences
        of some tenths of a logit; without it and with a KV cache of f32, logits are the same within 1e-4 however computed.
        `max_num_threads` None: every core that the process may use.
        Raises ModelError for a graph that breaks the agreement or does not compile, ConfigurationError for a pool too small or
        a precision that is not offered.
        """
        properties = device_properties(
            manifest,
            kv_precision=kv_precision,
            compute_precision=compute_precision,
            quantize_activations=quantize_activations,
        )
        properties["ENABLE_CPU_PINNING"] = pin_threads
        properties["CPU_RUNTIME_CACHE_CAPACITY"] = MAX_CACHED_KERNELS
        if max_num_threads is not None:
            properties["INFERENCE_NUM_THREADS"] = max_num_threads
        os.environ.setdefault(
            ONEDNN_CACHE_VARIABLE, str(MAX_CACHED_PRIMITIVES)
        )  # oneDNN offers no other way; read at first use
        model = graph() if callable(graph) else graph
        _check_graph(model)
        try:
            compiled = ov.Core().compile_model(model, "CPU", properties)
        except RuntimeError as error:
            raise ModelError(f"OpenVINO cannot compile the model: {error}") from error
        del model, graph
        return cls(compiled, manifest, num_blocks)

    @property
    def spec(self) -> ExecutorSpec:
        """What this executor offers."""
        return self._spec

    @property
    def num_full_rows(self) -> int:
        """Rows so far for which sampling needed all logits, not just the best candidates."""
        return self._sampler.num_full_rows

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the rows and draw their tokens. Releases the GIL while the device computes.

        Raises ValueError for a plan that contradicts itself and RuntimeError when the device fails.
        """
        self._sampler.forget(plan.released_ids)
        if not plan.rows:
            return StepResult(plan.step_id, {})
        inputs = self._layout.arrange(plan)
        began_ns = time.perf_counter_ns()
        self._infer(inputs)
        computed_ns = time.perf_counter_ns()
        if inputs.sampling_rows:
            tokens, failures = self._sampler.sample(inputs.sampling_rows, self._scores())
        else:
            tokens, failures = {}, {}
        return StepResult(
            plan.step_id,
            tokens,
            failures,
            forward_ns=computed_ns - began_ns,
            sample_ns=time.perf_counter_ns() - computed_ns,
        )

    def close(self) -> None:
        """Give back the model and the KV storage."""
        self._request = None  # before the storage under it
        self._storage = []
        self._output_ports = []
        self._step_ports = {}
        _give_back_memory()

    def _warm_up(self, compiled: Any, ports: list[_CachePort], manifest: Manifest) -> None:
        """A step with no pool yet: the device puts the weights into its own layout now, before free memory is looked at."""
        layout = PagedLayout(names.BLOCK_SIZE, 0, manifest.vocab_size)
        self._allocate(compiled, ports, layout.num_storage_blocks)
        self._infer(layout.filler())
        _give_back_memory()

    def _allocate(self, compiled: Any, ports: list[_CachePort], num_blocks: int) -> None:
        """KV storage of zeros that takes memory only as it is written: anonymous pages, not the heap.

        Zeros matter: attention may read slots of a block that nothing was written to yet, and weigh them with 0, but 0 times
        a NaN left in recycled memory is a NaN.
        """
        storages = []
        for port in ports:
            num_bytes = port.bytes_per_block * num_blocks
            pages = mmap.mmap(-1, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            storage = np.frombuffer(pages, np.uint8, num_bytes)
            shape = [num_blocks, *port.block_shape]
            storages.append(storage)
            self._request.set_tensor(compiled.input(port.name), ov.Tensor(storage, shape, port.element_type))
        self._storage = storages  # what was there before goes only now that nothing points to it

    def _infer(self, inputs: PagedInputs) -> None:
        request, ports = self._request, self._step_ports
        for name in _STEP_INPUTS:
            request.set_tensor(ports[name], ov.Tensor(getattr(inputs, name), shared_memory=True))
        request.start_async()  # not infer(): that would wrap and copy every output, the full logits too
        request.wait()

    def _scores(self) -> Scores:
        """Views of the outputs, which the next inference overwrites."""
        logits, values, indices, normalizer = (self._request.get_tensor(port).data for port in self._output_ports)
        return Scores(logits[:, 0], values[:, 0], indices[:, 0], normalizer[:, 0, 0])


def device_properties(
    manifest: Manifest, *, kv_precision: KvPrecision, compute_precision: ComputePrecision, quantize_activations: bool
) -> dict[str, Any]:
    """What the device is told about numbers. Raises ConfigurationError for a KV precision that is not offered."""
    if kv_precision not in get_args(KvPrecision):
        raise ConfigurationError(
            f"A KV cache of {kv_precision} is not offered here; choose one of {', '.join(get_args(KvPrecision))}."
        )
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": compute_precision}
    if kv_precision != "auto":
        properties["KV_CACHE_PRECISION"] = kv_precision
    if not quantize_activations:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    elif manifest.precision == "int8":
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = CHANNEL_ACTIVATION_GROUP
    return properties


def _check_graph(model: Any) -> None:
    """Raise ModelError unless the graph has the agreed inputs and outputs."""
    inputs = {min(port.get_names(), default="an input without a name") for port in model.inputs}
    caches = {name for name in inputs if name.startswith((names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX))}
    num_layers = len(caches) // 2
    expected = {
        f"{prefix}{layer}" for prefix in (names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX) for layer in range(num_layers)
    }
    outputs = {name for port in model.outputs for name in port.get_names()}
    wrong = (inputs - caches) ^ set(_STEP_INPUTS) | caches ^ expected | set(_OUTPUTS) - outputs
    if wrong or not num_layers:
        at_fault = ", ".join(sorted(wrong)) or "no layers"
        raise ModelError(f"This is not a graph for paged attention as Headrace prepares it (at fault: {at_fault}).")


def _cache_ports(compiled: Any) -> list[_CachePort]:
    """The cache inputs as the device wants them. Raises ModelError for a layout that is not in blocks of BLOCK_SIZE."""
    ports = []
    for port in compiled.inputs:
        name = port.get_any_name()
        if not name.startswith((names.KEY_CACHE_PREFIX, names.VALUE_CACHE_PREFIX)):
            continue
        shape = list(port.get_partial_shape())
        if len(shape) != 4 or any(dimension.is_dynamic for dimension in shape[1:]):
            raise ModelError(f"The device gave {name} the shape {port.get_partial_shape()}; one with four axes was expected.")
        block_shape = tuple(dimension.get_length() for dimension in shape[1:])
        # Keys quantized by channel have further lines in a block for the scales, so that only values show its size.
        if name.startswith(names.VALUE_CACHE_PREFIX) and block_shape[1] != names.BLOCK_SIZE:
            raise ModelError(f"The device wants blocks of {block_shape[1]} tokens, not {names.BLOCK_SIZE}.")
        ports.append(_CachePort(name, port.get_element_type(), block_shape))
    return ports


def _give_back_memory() -> None:
    """Return what loading and compiling freed to the system: glibc would keep it, and it is as large as the model."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every C library
        if trim is not None:
            trim(0)
