"""What charts show of raw records, against plain counting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.records import Outcome, RequestRecord
from headrace.loadtest.report import samples
from tests.loadtest.report.made_up_runs import make_run


def test_samples_are_those_of_completed_requests_of_the_window():
    run = make_run(num_refused=2, num_failed=3)
    kept = [
        record
        for record in run.requests
        if record.outcome is Outcome.COMPLETED and run.window_begin <= record.scheduled < run.window_end
    ]
    assert len(kept) < len(run.requests) - 5, "the case should leave out a warm-up"
    assert list(samples.ttft_samples([run])) == [record.chunk_times[0] - record.sent for record in kept]
    assert samples.gap_samples([run]).size == sum(len(record.chunk_times) - 1 for record in kept)
    assert samples.gap_samples([]).size == samples.ttft_samples([]).size == 0


times = st.floats(min_value=0, max_value=50).map(lambda value: round(value, 1))


@given(st.lists(st.tuples(times, times, times, st.booleans()), max_size=12))
def test_concurrency_agrees_with_counting(spans):
    run = make_run(num_requests=1)
    run.requests = []
    for index, (one, two, three, has_text) in enumerate(spans):
        sent, first, ended = sorted((one, two, three))
        record = RequestRecord(index=index, process=0, scheduled=sent, sent=sent, ended=ended)
        record.chunk_times = [first] if has_text else []
        run.requests.append(record)
    state = samples.concurrency(run)
    assert np.all(np.diff(state.times) > 0)
    for at, waiting, streaming in zip(state.times, state.waiting, state.streaming, strict=True):
        running = [record for record in run.requests if record.sent <= at < record.ended]
        with_text = [record for record in running if record.chunk_times and record.chunk_times[0] <= at]
        assert (waiting, streaming) == (len(running) - len(with_text), len(with_text))
    if spans:
        assert (state.waiting[-1], state.streaming[-1]) == (0, 0)


def test_tokens_over_time_add_up_to_usage():
    run = make_run(merged=2)
    _, rates = samples.tokens_over_time(run, 0.25)
    assert rates.sum() * 0.25 == np.float64(sum(record.output_tokens for record in run.requests))


@given(st.floats(min_value=0.001, max_value=1e5))
def test_bins_are_round_and_not_too_many(wall):
    width = samples.nice_bin_seconds(wall)
    assert width >= 0.0499
    assert wall / width <= 81


def test_an_unfinished_request_ends_with_its_run():
    run = make_run(num_requests=3)
    run.requests[0].ended = None
    assert samples.end_of(run.requests[0], run) == run.wall_seconds
