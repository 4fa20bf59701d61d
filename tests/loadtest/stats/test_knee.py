"""The knee of a sweep, there and not there."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loadtest.detection import SweepPoint, find_knee

LOADS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def points(throughput, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    return [SweepPoint(load, throughput(load) * generator.normal(1.0, noise) if noise else throughput(load)) for load in LOADS]


def test_a_sharp_knee_is_found_where_it_is():
    verdict = find_knee(points(lambda load: min(40.0 * load, 640.0)))
    assert verdict.found
    assert verdict.load == pytest.approx(16.0, rel=0.05)
    assert verdict.tokens_per_second == pytest.approx(640.0, rel=0.05)
    assert "knee" in verdict.sentence


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([8.0, 16.0, 24.0]))
def test_a_noisy_knee_is_found_near_where_it_is(seed, knee):
    verdict = find_knee(points(lambda load: 40.0 * min(load, knee), noise=0.02, seed=seed))
    assert verdict.found, verdict
    assert verdict.load == pytest.approx(knee, rel=0.3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_server_that_never_saturates_has_no_knee(seed):
    verdict = find_knee(points(lambda load: 40.0 * load, noise=0.03, seed=seed))
    assert not verdict.found, verdict
    assert verdict.is_judged
    assert verdict.load is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_server_that_is_full_from_the_start_has_no_knee_to_the_right(seed):
    verdict = find_knee(points(lambda _: 500.0, noise=0.02, seed=seed))
    assert not verdict.found or verdict.load <= LOADS[2], verdict


def test_a_line_without_noise_is_no_knee():
    assert not find_knee(points(lambda load: 40.0 * load)).found
    assert not find_knee(points(lambda _: 500.0)).found
    assert not find_knee(points(lambda _: 0.0)).found


def test_a_throughput_that_falls_behind_its_knee_is_still_a_knee():
    verdict = find_knee(points(lambda load: 40.0 * load if load <= 16 else 640.0 - 2.0 * (load - 16)))
    assert verdict.found
    assert verdict.load == pytest.approx(16.0, rel=0.1)


def test_few_levels_are_not_judged():
    verdict = find_knee([SweepPoint(1, 10.0), SweepPoint(2, 20.0), SweepPoint(2, 21.0), SweepPoint(4, 22.0)])
    assert not verdict.is_judged
    assert not verdict.found
    assert "fewer than 4" in verdict.sentence
    assert not find_knee([]).is_judged


def test_the_order_of_points_does_not_matter():
    found = points(lambda load: min(40.0 * load, 640.0))
    assert find_knee(found[::-1]) == find_knee(found)
