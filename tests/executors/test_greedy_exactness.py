"""Greedy output of the default model does not depend on how it is computed: alone or together, in whatever chunks, on a
prefix-cache hit, after a preemption. With KV cache and activations in float32; for what is served by default, which quantizes
both, agreement is measured. Real scheduler, real executor."""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from tokenizers import Tokenizer

from headrace.executors.openvino_paged import OpenVINOExecutor
from headrace.models.prepare import load_graph
from headrace.protocol.graph import TOKENIZER_FILE
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.manifest import Manifest
from headrace.protocol.messages import GenerationRequest, TokenEvent
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.scheduling.statistics import SchedulerStatistics
from tests.contracts.executor_contract import Stepper, Story

pytestmark = pytest.mark.slow

NUM_PROMPTS = 16
NUM_OUTPUT_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0)
Outputs = list[list[int]]


def request(
    request_id: int, prompt: list[int], sampling: SamplingParams = GREEDY, num_tokens: int = NUM_OUTPUT_TOKENS
) -> GenerationRequest:
    stopping = StopConditions(max_tokens=num_tokens, ignore_eos=True)
    return GenerationRequest(request_id, "", 0, prompt, sampling, stopping, 0, 0, "", 0, "")


def run(scheduler: Scheduler, executor: OpenVINOExecutor, requests: list[GenerationRequest]) -> Outputs:
    """All requests at once, to their ends; outputs in the order of the requests."""
    outputs: dict[int, list[int]] = {r.request_id: [] for r in requests}
    for r in requests:
        scheduler.add(r, 0)
    ended: list[TokenEvent] = []
    while scheduler.has_work:
        plan = scheduler.schedule(0)
        scheduler.apply(plan, executor.execute(plan), 0)
        scheduler.check_integrity()
        for event in scheduler.take_events().get(0, []):
            assert event.first_index == len(outputs[event.request_id])
            outputs[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                ended.append(event)
    assert {event.finish_reason for event in ended} == {FinishReason.LENGTH}
    return list(outputs.values())


def together(
    executor: OpenVINOExecutor,
    prompts: list[list[int]],
    *,
    budget: int = 512,
    num_blocks: int | None = None,
    num_tokens: int = NUM_OUTPUT_TOKENS,
) -> tuple[Outputs, SchedulerStatistics]:
    """Outputs of the prompts run at once, and what the scheduler counted. Without a prefix cache."""
    spec = replace(executor.spec, num_blocks=num_blocks or executor.spec.num_blocks)
    scheduler = Scheduler(SchedulerConfig(NUM_PROMPTS, budget, 1024, enable_prefix_caching=False), spec)
    requests = [request(i, prompt, num_tokens=num_tokens) for i, prompt in enumerate(prompts)]
    return run(scheduler, executor, requests), scheduler.statistics()


@pytest.fixture(scope="module")
def prompts(default_model_folder: Path) -> list[list[int]]:
    """Sixteen prompts of 5 to 170 tokens of Python source; every third begins with the same 70 tokens."""
    text = Path(argparse.__file__).read_text() + Path(statistics.__file__).read_text()
    ids = Tokenizer.from_file(str(default_model_folder / TOKENIZER_FILE)).encode(text, add_special_tokens=False).ids
    pieces = [ids[500 * i : 500 * i + 5 + 11 * i] for i in range(NUM_PROMPTS)]
    return [ids[-70:] + piece[:40] if i % 3 == 0 else piece for i, piece in enumerate(pieces)]


@pytest.fixture(scope="module")
def executor(default_model_folder: Path, default_manifest: Manifest) -> Iterator[OpenVINOExecutor]:
    executor = OpenVINOExecutor.open(
        lambda: load_graph(default_model_folder),
        default_manifest,
        num_blocks=160,
        kv_precision="f32",
        quantize_activations=False,
    )
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def alone(executor: OpenVINOExecutor, prompts: list[list[int]]) -> Outputs:
    """Each prompt by itself, whole."""
    return [together(executor, [prompt])[0][0] for prompt in prompts]


def test_with_quantized_activations_bits_do_not_depend_on_the_batch(
    default_graph: ov.Model, default_manifest: Manifest, prompts: list[list[int]]
) -> None:
    """DET-04 as served by default: a decoding row alone and beside others, a prompt whole, in chunks and beside others."""
    executor = OpenVINOExecutor.open(default_graph, default_manifest, num_blocks=40, kv_precision="f32")

    def logits(*rows: tuple[Story, int | None]) -> npt.NDArray[np.float32]:
        Stepper(executor).step(*rows)
        return executor._scores().logits[-1].copy()

    prompt = prompts[-1]
    whole = logits((Story(1, prompt, range(6)), None))
    chunked, single, beside = (Story(2 + i, prompt, range(6 * i, 6 * i + 6)) for i in range(3))
    while len(prompt) - chunked.num_computed > 16:
        Stepper(executor).step((chunked, 16))
    assert (logits((chunked, None)) == whole).all()
    others = [(Story(10 + i, prompts[1][i:], [20 + i]), None) for i in range(15)]
    Stepper(executor).step((single, len(prompt) - 1))
    Stepper(executor).step(*others, (beside, len(prompt) - 1))
    alone = logits((single, None))
    assert (logits(*others, (beside, None)) == alone).all()
    executor.close()


@pytest.mark.parametrize("budget", [16, 512])
def test_in_a_batch_and_in_chunks(executor: OpenVINOExecutor, prompts: list[list[int]], alone: Outputs, budget: int) -> None:
    """DET-04, SCH-10: sixteen at once, in steps of at most 16 and 512 tokens."""
    outputs, _ = together(executor, prompts, budget=budget)
    assert outputs == alone


def test_on_a_prefix_cache_hit(executor: OpenVINOExecutor, prompts: list[list[int]], alone: Outputs) -> None:
    """DET-01, DET-02: the second round of the same prompts finds their blocks, and says the same."""
    scheduler = Scheduler(SchedulerConfig(NUM_PROMPTS, 512, 1024), executor.spec)
    cold = run(scheduler, executor, [request(i, prompt) for i, prompt in enumerate(prompts)])
    before = scheduler.statistics().num_cached_prompt_tokens
    warm = run(scheduler, executor, [request(100 + i, prompt) for i, prompt in enumerate(prompts)])
    num_full_blocks = sum((len(prompt) - 1) // executor.spec.block_size for prompt in prompts)
    assert scheduler.statistics().num_cached_prompt_tokens - before == num_full_blocks * executor.spec.block_size > 0
    assert cold == warm == alone


def test_after_forced_preemption(executor: OpenVINOExecutor, prompts: list[list[int]], alone: Outputs) -> None:
    """DET-04: a pool that four may enter and in which three cannot end; what is preempted is computed anew and goes on."""
    four, block_size = prompts[:4], executor.spec.block_size
    num_blocks = sum(-(-len(prompt) // block_size) for prompt in four) + len(four) - 1
    outputs, counted = together(executor, four, num_blocks=num_blocks, num_tokens=3 * block_size // 2)
    undisturbed, not_counted = together(executor, four, num_tokens=3 * block_size // 2)
    assert counted.num_preemptions > not_counted.num_preemptions == 0
    assert counted.num_recomputed_tokens > 0
    assert outputs == undisturbed
    assert [output[:NUM_OUTPUT_TOKENS] for output in outputs] == alone[:4]


def test_a_seed_alone_and_beside_others(executor: OpenVINOExecutor, prompts: list[list[int]]) -> None:
    """DET-05: seed 42 gives the same text in four runs, whatever the seeds of its neighbours."""
    seeded = request(7, prompts[4], SamplingParams(temperature=0.8, top_p=0.95, seed=42))
    seen = []
    for number in range(4):
        neighbours = [
            request(100 + i, prompts[i], SamplingParams(temperature=1.0, seed=1000 * number + i)) for i in range(2 * number)
        ]
        scheduler = Scheduler(SchedulerConfig(NUM_PROMPTS, 64, 1024), executor.spec)
        seen.append(run(scheduler, executor, [*neighbours, seeded])[-1])
    assert seen == [seen[0]] * 4
    other = request(7, prompts[4], SamplingParams(temperature=0.8, top_p=0.95, seed=43))
    assert run(Scheduler(SchedulerConfig(NUM_PROMPTS, 64, 1024), executor.spec), executor, [other]) != seen[:1]


def test_as_served_by_default_it_mostly_agrees(
    default_graph: ov.Model,
    default_manifest: Manifest,
    prompts: list[list[int]],
    alone: Outputs,
) -> None:
    """KV cache in u8, activations in int8: first tokens nearly always agree with float32; later ones drift."""
    executor = OpenVINOExecutor.open(default_graph, default_manifest, num_blocks=160, kv_precision="u8")
    outputs, _ = together(executor, prompts)
    by_chunks, _ = together(executor, prompts, budget=16)
    executor.close()
    first = sum(a[0] == b[0] for a, b in zip(outputs, alone, strict=True)) / NUM_PROMPTS
    same, same_by_chunks = (agreement(outputs, other) for other in (alone, by_chunks))
    print(f"KV u8, activations int8, against f32: first token {first:.3f}, before the first difference {same:.3f}")
    print(f"KV u8, in steps of 512 and of 16 tokens: before the first difference {same_by_chunks:.3f}")
    assert first >= 0.8
    assert same >= 0.4


def agreement(outputs: Outputs, others: Outputs) -> float:
    """Which part of the tokens comes before the first that differs."""
    common = 0
    for output, other in zip(outputs, others, strict=True):
        common += next((i for i, (a, b) in enumerate(zip(output, other, strict=True)) if a != b), len(output))
    return common / sum(map(len, outputs))
