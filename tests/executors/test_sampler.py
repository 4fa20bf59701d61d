"""Sampling: short list and all logits give the same token, which is the one of the plain definition; every parameter's case."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.executors.inverse_cdf import MAX_SORTED, Draws, draw_from_all
from headrace.executors.sampler import Sampler, Scores
from headrace.executors.uniform import uniform
from headrace.protocol.errors import ErrorCode
from headrace.protocol.sampling import MAX_SEED
from headrace.protocol.step import StepRow
from tests.executors.sampling_rows import plain_sample, sampling_row, scores_of

BORDER = 1e-5  # nearer to a border than this, float32 may fall on its other side: neither is wrong


def sample_one(logits: np.ndarray, row: StepRow, top_k: int = 64) -> int:
    return Sampler(len(logits)).sample([row], scores_of(logits[None], top_k))[0][row.request_id]


def without_short_list(scores: Scores) -> Scores:
    """The same logits with a normaliser that is of no use, so that every row goes over all of them."""
    return Scores(scores.logits, scores.top_values, scores.top_indices, np.full_like(scores.log_normalizer, np.nan))


SHAPES = st.sampled_from(["flat", "peaked", "steps", "gaps", "minus infinity"])


@st.composite
def logits_arrays(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> np.ndarray:
    size = draw(sizes)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.standard_normal(size).astype(np.float32)
    shape = draw(SHAPES)
    if shape == "peaked":
        logits *= 8
    elif shape == "steps":  # many ties
        logits = np.round(logits * 2)
    elif shape == "gaps":
        logits[random.integers(0, size, 3)] += 20
    elif shape == "minus infinity":
        logits[random.random(size) < 0.7] = -np.inf
        logits[int(random.integers(size))] = 1.0
    return logits


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, float | int]:
    chosen: dict[str, float | int] = {
        "temperature": draw(st.sampled_from([0.2, 0.7, 1.0, 1.0, 1.3, 2.0])),
        "seed": draw(st.integers(0, MAX_SEED)),
    }
    for name, values in {
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(1, 200),
        "min_p": st.floats(0.001, 1.0),
    }.items():
        if draw(st.booleans()):
            chosen[name] = draw(values)
    return chosen


@settings(max_examples=300, deadline=None)
@given(logits_arrays(st.integers(2, 4000)), samplings(), st.sampled_from([1, 2, 16, 64]))
def test_short_list_and_all_logits_agree(logits: np.ndarray, sampling: dict[str, float | int], top_k: int) -> None:
    """Whatever the list decides, all logits decide too: the way that a row takes is not seen in its outcome."""
    row, scores = sampling_row(**sampling), scores_of(logits[None], top_k)
    by_list, by_all = Sampler(len(logits)), Sampler(len(logits))
    expected = by_all.sample([row], without_short_list(scores))
    assert by_all.num_full_rows == 1
    assert by_list.sample([row], scores) == expected


@settings(max_examples=200, deadline=None)
@given(logits_arrays(st.integers(2, 300)), samplings(), st.data())
def test_tokens_are_those_of_the_definition(logits: np.ndarray, sampling: dict[str, float | int], data: st.DataObject) -> None:
    """With and without penalties, bias and forbidden tokens."""
    if data.draw(st.booleans()):
        logits = np.nan_to_num(logits, neginf=-50.0)
        token_ids = st.integers(0, len(logits) - 1)
        sampling |= {
            "repetition_penalty": data.draw(st.sampled_from([1.0, 1.1, 2.0, 0.5])),
            "presence_penalty": data.draw(st.sampled_from([0.0, 1.5, -1.0])),
            "frequency_penalty": data.draw(st.sampled_from([0.0, 0.5, -0.25])),
        }
        row = sampling_row(
            prompt=tuple(data.draw(st.lists(token_ids, min_size=1, max_size=5))),
            output=tuple(data.draw(st.lists(token_ids, max_size=8))),
            forbidden=tuple(data.draw(st.sets(token_ids, max_size=min(3, len(logits) - 1)))),
            logit_bias=data.draw(st.dictionaries(token_ids, st.sampled_from([-3.0, 2.5]), max_size=3)),
            **sampling,
        )
    else:
        row = sampling_row(**sampling)
    expected, slack = plain_sample(logits, row)
    assume(slack > BORDER)
    assert sample_one(logits, row) == expected


@settings(max_examples=25, deadline=None)
@given(logits_arrays(st.integers(4 * MAX_SORTED, 20_000)), samplings())
def test_selection_by_mass_finds_what_sorting_finds(logits: np.ndarray, sampling: dict[str, float | int]) -> None:
    """Vocabularies that are larger than what is sorted at once."""
    row = sampling_row(**sampling)
    expected, slack = plain_sample(logits, row)
    assume(slack > BORDER)
    assert Sampler(len(logits)).sample([row], without_short_list(scores_of(logits[None])))[0] == {1: expected}


@pytest.mark.parametrize("error", [-5e-5, 5e-5])
def test_a_draw_on_the_border_goes_over_all_logits(error: float) -> None:
    """Where the graph's normaliser, wrong in its last digits, could move the border across the draw."""
    logits = np.array([1.0, 0.5, 0.0, -0.5], np.float32)
    masses = np.exp(logits.astype(np.float64))
    border = masses[0] / masses.sum()
    near = [seed for seed in range(200_000) if abs(uniform(seed, 1) - border) < 2e-5]
    assert {uniform(seed, 1) < border for seed in near} == {True, False}
    scores = scores_of(logits[None], top_k=2)
    scores = Scores(scores.logits, scores.top_values, scores.top_indices, scores.log_normalizer + np.float32(error))
    for seed in near:
        sampler = Sampler(4)
        assert sampler.sample([sampling_row(seed=seed)], scores)[0][1] == int(uniform(seed, 1) > border)
        assert sampler.num_full_rows == 1


def test_a_nucleus_that_is_full_takes_no_more() -> None:
    """top_p 0.5 of two equals is the first of them."""
    logits = np.array([2.0, 2.0, -np.inf], np.float32)
    assert {sample_one(logits, sampling_row(seed=seed, top_p=0.5)) for seed in range(30)} == {0}


def test_rounding_never_leads_to_a_token_without_mass() -> None:
    """The greatest number that can be drawn, times a sum, may be more than the same terms add up to in another order."""
    random = np.random.default_rng(0)
    top = Draws(np.ones(1), np.ones(1), np.zeros(1, np.int64), np.zeros(1), np.full(1, np.nextafter(1.0, 0.0)))
    for _ in range(100):
        logits = random.standard_normal(3000).astype(np.float32) * 3
        logits[random.random(3000) < 0.5] = -np.inf
        assert logits[draw_from_all(logits, top)] > -np.inf


def test_frequencies_are_the_models_probabilities() -> None:
    """4,000 seeds: chi-squared over the likelier tokens, some of which lie beyond the short list."""
    logits = np.linspace(2.0, -2.0, 40).astype(np.float32)
    expected = np.exp(logits) / np.exp(logits).sum()
    sampler, scores, counts = Sampler(40), scores_of(logits[None], top_k=8), np.zeros(40)
    for seed in range(4000):
        counts[sampler.sample([sampling_row(seed=seed)], scores)[0][1]] += 1
    chi_squared = float(((counts - 4000 * expected) ** 2 / (4000 * expected)).sum())
    assert chi_squared < 80  # 39 degrees of freedom: 1 in 10,000
    assert 0 < sampler.num_full_rows < 2500


def test_the_short_list_serves_most_draws() -> None:
    """Of a distribution as a language model has it, over 50,000 tokens. Greedy, top_k within the list and min_p always."""
    size = 50_000
    random = np.random.default_rng(1)
    logits = -np.log1p(random.permutation(size)).astype(np.float32) * 2.0
    scores = scores_of(logits[None].repeat(50, 0))
    for sampling, most in (
        ({"temperature": 0.0}, 0),
        ({"top_k": 40}, 0),
        ({"min_p": 0.05}, 0),
        ({"temperature": 1.0}, 5),
        ({"temperature": 0.7}, 3),
        ({"temperature": 0.8, "top_p": 0.95}, 3),
    ):
        sampler = Sampler(size)
        sampler.sample([sampling_row(i, seed=i, **sampling) for i in range(50)], scores)
        assert sampler.num_full_rows <= most, sampling


@settings(max_examples=30, deadline=None)
@given(st.lists(samplings(), min_size=2, max_size=8), st.integers(0, 2**32))
def test_a_row_alone_and_in_a_batch(many: list[dict[str, float | int]], noise: int) -> None:
    """DET-05: neighbours change nothing."""
    logits = np.random.default_rng(noise).standard_normal((len(many), 500)).astype(np.float32) * 3
    rows = [sampling_row(i, **sampling) for i, sampling in enumerate(many)]
    tokens, failures = Sampler(500).sample(rows, scores_of(logits))
    assert not failures
    assert tokens == {i: sample_one(logits[i], row) for i, row in enumerate(rows)}


def test_the_draw_depends_on_the_position() -> None:
    logits = np.zeros(300, np.float32)
    drawn = {sample_one(logits, sampling_row(prompt=(0,) * n, seed=5)) for n in range(1, 30)}
    assert len(drawn) > 20


@given(logits_arrays(st.integers(2, 300)), st.integers(0, MAX_SEED))
def test_all_ways_to_ask_for_greedy_agree(logits: np.ndarray, seed: int) -> None:
    """INP-17: temperature 0, top_k 1 and top_p towards 0 give the same token; the lowest id of equals."""
    best = int(np.argmax(logits))
    for sampling in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-9}, {"top_k": 1, "top_p": 0.5}):
        if sampling == {"temperature": 1e-9} and np.count_nonzero(logits == logits[best]) > 1:
            continue  # draws among equals
        for top_k in (1, 2, 64):
            assert sample_one(logits, sampling_row(seed=seed, **sampling), top_k) == best


def test_equal_best_tokens_beyond_the_list() -> None:
    """Greedy with more equals than the list holds: the lowest id of all of them, not of the list."""
    logits = np.full(200, 1.5, np.float32)
    logits[:3] = 0.0
    assert sample_one(logits, sampling_row(temperature=0.0)) == 3


def test_penalties_count_occurrences_and_subtract() -> None:
    """INP-13: frequency_penalty * count + presence_penalty, over output tokens only."""
    logits = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    greedy = {"temperature": 0.0}
    assert sample_one(logits, sampling_row(prompt=(0, 0, 0), frequency_penalty=2.0, **greedy)) == 0
    assert sample_one(logits, sampling_row(output=(0,), frequency_penalty=0.9, **greedy)) == 0
    assert sample_one(logits, sampling_row(output=(0, 0), frequency_penalty=0.9, **greedy)) == 1
    assert sample_one(logits, sampling_row(output=(0, 0), presence_penalty=0.9, **greedy)) == 0
    assert sample_one(logits, sampling_row(output=(0, 1), presence_penalty=2.0, **greedy)) == 0
    assert sample_one(logits, sampling_row(output=(0, 0, 1), frequency_penalty=1.6, **greedy)) == 2
    assert sample_one(logits, sampling_row(output=(3,), presence_penalty=-2.0, frequency_penalty=-1.5, **greedy)) == 3


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    """Once for each token of prompt or output, however often and in both it stands (CTRL)."""
    greedy = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert sample_one(np.array([3.0, 2.0], np.float32), sampling_row(prompt=(0,), **greedy)) == 1
    assert sample_one(np.array([5.0, 2.0], np.float32), sampling_row(prompt=(0, 0), output=(0,), **greedy)) == 0
    assert sample_one(np.array([-1.0, -1.5], np.float32), sampling_row(prompt=(0,), **greedy)) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_bias_of_100_forces_and_minus_100_bans(temperature: float) -> None:
    """INP-05."""
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 5
    best = int(logits.argmax())
    for seed in range(20):
        forced = sampling_row(temperature=temperature, seed=seed, logit_bias={17: 100.0})
        assert sample_one(logits, forced) == 17
        banned = sampling_row(temperature=temperature, seed=seed, logit_bias={best: -100.0})
        assert sample_one(logits, banned) != best


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = np.array([0.0, 9.0, 8.0, 0.0], np.float32)
    assert sample_one(logits, sampling_row(temperature=0.0, forbidden=(1,))) == 2
    for seed in range(50):
        row = sampling_row(temperature=2.0, seed=seed, forbidden=(1, 2), logit_bias={1: 100.0})
        assert sample_one(logits, row) in (0, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_k": 5}, {"repetition_penalty": 1.2}])
def test_logits_that_are_no_numbers_fail_their_row_alone(bad: float, sampling: dict[str, float]) -> None:
    """INP-16: a NaN anywhere, an infinity: an error of that request, the neighbours sample on."""
    logits = np.random.default_rng(0).standard_normal((3, 400)).astype(np.float32)
    logits[1, 333] = bad
    rows = [sampling_row(i, **sampling) for i in range(3)]
    tokens, failures = Sampler(400).sample(rows, scores_of(logits))
    assert set(tokens) == {0, 2}
    assert set(failures) == {1}
    assert ErrorCode.from_wire(failures[1].code) is ErrorCode.EXECUTION_FAILED


def test_nothing_left_to_draw_is_a_failure() -> None:
    """INP-16: all logits -inf, or every token forbidden."""
    nothing = np.full((1, 4), -np.inf, np.float32)
    for sampling in ({"temperature": 0.0}, {}):
        with np.errstate(invalid="ignore"):
            assert set(Sampler(4).sample([sampling_row(**sampling)], scores_of(nothing))[1]) == {1}
        everything = sampling_row(forbidden=(0, 1, 2, 3), **sampling)
        assert set(Sampler(4).sample([everything], scores_of(np.ones((1, 4), np.float32)))[1]) == {1}


@given(samplings())
def test_padding_ids_are_never_drawn(sampling: dict[str, float | int]) -> None:
    """GGU-10: rows beyond the vocabulary, even where a graph lets them win."""
    random = np.random.default_rng(3)
    logits = random.standard_normal((1, 72)).astype(np.float32)
    honest = scores_of(logits[:, :64], top_k=16, num_padding=8)
    careless = scores_of(np.where(np.arange(72) >= 64, np.float32(9.0), logits), top_k=16)
    for scores in (honest, careless):
        token = Sampler(64).sample([sampling_row(**sampling)], scores)[0][1]
        assert token < 64
        assert token == sample_one(logits[0, :64], sampling_row(**sampling))


def test_what_is_held_for_penalties_is_forgotten_and_rebuilt() -> None:
    """State is a cache of the history: growing, shrinking and released histories give what a fresh sampler gives."""
    logits = np.array([[4.0, 3.5, 3.0, 2.5]], np.float32)
    scores, kept = scores_of(logits), Sampler(4)
    for output in ((), (0,), (0, 1), (0, 1, 2), (0,), (0, 0, 0)):
        row = sampling_row(output=output, temperature=0.0, frequency_penalty=1.0)
        assert kept.sample([row], scores) == Sampler(4).sample([row], scores)
    assert kept.num_held == 1
    kept.forget([1, 99])
    assert kept.num_held == 0
    kept.sample([sampling_row(2)], scores)
    assert kept.num_held == 0
