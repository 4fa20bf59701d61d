"""Rows and scores for tests of the sampler, and the sampler's definition written plainly."""

import math

import numpy as np

from headrace.executors.sampler import Scores
from headrace.executors.uniform import uniform
from headrace.protocol.sampling import SamplingParams
from headrace.protocol.step import StepRow


def sampling_row(
    request_id: int = 1,
    *,
    prompt: tuple[int, ...] = (0,),
    output: tuple[int, ...] = (),
    forbidden: tuple[int, ...] = (),
    **sampling: object,
) -> StepRow:
    history = [*prompt, *output]
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return StepRow(request_id, history[-1:], len(history) - 1, [0], True, params, history, len(prompt), forbidden)


def scores_of(logits: np.ndarray, top_k: int = 64, num_padding: int = 0) -> Scores:
    """As the graph would give them for logits [R, V]; ties in the short list in descending order of id, to be unkind."""
    logits = logits.astype(np.float32)
    order = np.lexsort((-np.arange(logits.shape[1])[None, :].repeat(len(logits), 0), -logits), axis=1)
    best = order[:, : min(top_k, logits.shape[1])].astype(np.int32)
    largest = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        total = np.exp(logits - largest, dtype=np.float32).sum(axis=1)
        normalizer = largest[:, 0] + np.log(total)
    padded = np.pad(logits, ((0, 0), (0, num_padding)), constant_values=-1e30)
    return Scores(padded, np.take_along_axis(logits, best, axis=1), best, normalizer.astype(np.float32))


def plain_sample(logits: np.ndarray, row: StepRow) -> tuple[int, float]:
    """The definition, without any haste: the token, and how far the draw is from the nearest border between two outcomes."""
    sampling, size = row.sampling, len(logits)
    values = [float(value) for value in logits]
    for token_id, bias in (sampling.logit_bias or {}).items():
        values[token_id] += bias
    output = list(row.history[row.num_prompt_tokens :])
    for token_id in set(row.history):
        penalty = sampling.repetition_penalty
        values[token_id] = values[token_id] / penalty if values[token_id] > 0 else values[token_id] * penalty
    for token_id in set(output):
        values[token_id] -= output.count(token_id) * sampling.frequency_penalty + sampling.presence_penalty
    for token_id in row.forbidden_token_ids:
        values[token_id] = -math.inf
    order = sorted(range(size), key=lambda token_id: (-values[token_id], token_id))
    best = values[order[0]]
    if sampling.is_greedy:
        return order[0], min((best - values[token_id] for token_id in order[1:]), default=1.0)
    mass = [math.exp((values[token_id] - best) / sampling.temperature) for token_id in order]
    slack = 1.0
    if sampling.min_p > 0:
        slack = min([slack, *(abs(m - sampling.min_p) / sampling.min_p for m in mass)])
        mass = [m for m in mass if m >= sampling.min_p]
    if sampling.top_k:
        mass = mass[: sampling.top_k]
    if sampling.top_p < 1:
        total, before, kept = sum(mass), 0.0, 0
        while kept < len(mass) and before < sampling.top_p * total:
            before += mass[kept]
            kept += 1
            slack = min(slack, abs(before / total - sampling.top_p))
        mass = mass[:kept]
    target, before = uniform(sampling.seed, len(row.history)) * sum(mass), 0.0
    for place, part in enumerate(mass):
        slack = min(slack, abs(before + part - target) / sum(mass))
        before += part
        if before > target:
            return order[place], slack
    raise AssertionError("the masses do not add up")
