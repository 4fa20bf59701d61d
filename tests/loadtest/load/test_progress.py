"""The live tally and the phases of a run, the windows, and what the engine asks of settings."""

import pytest

from headrace.loadtest.client_process import back_off_seconds
from headrace.loadtest.coordinator import client_setup, load_extra, measured_window
from headrace.loadtest.engine import check_settings
from headrace.loadtest.http_client import retry_after_seconds
from headrace.loadtest.plan import LoadPlan
from headrace.loadtest.progress import Phase, Tally, phase_at
from headrace.loadtest.records import Outcome, RequestRecord, RunSettings


def wanted(**more: object) -> RunSettings:
    return RunSettings(**{"url": "http://x/v1", "model": "m", "num_clients": 2, **more})  # type: ignore[arg-type]


def ended(outcome: Outcome, *, texts: int = 0, tokens: int | None = None) -> RequestRecord:
    return RequestRecord(index=0, process=0, scheduled=0, sent=0, outcome=outcome, counted_chunks=texts, output_tokens=tokens)


def test_tokens_are_texts_while_a_request_runs_and_usage_after() -> None:
    tally = Tally(2)
    tally.take(0, num_sent=2, num_running=2, num_texts=10, max_send_lag_seconds=0.5)
    tally.take(1, num_sent=1, num_running=0, num_texts=4, max_send_lag_seconds=0.1)
    first = tally.progress(Phase.MEASURING, 1.0, max_requests=9, max_seconds=None)
    assert (first.num_sent, first.num_running, first.output_tokens, first.max_send_lag_seconds) == (3, 2, 14, 0.5)
    tally.end(ended(Outcome.COMPLETED, texts=4, tokens=8))
    tally.end(ended(Outcome.REFUSED))
    tally.end(ended(Outcome.UNFINISHED, texts=1))
    second = tally.progress(Phase.MEASURING, 2.0, max_requests=9, max_seconds=None)
    assert (second.num_completed, second.num_refused, second.num_failed, second.num_done) == (1, 1, 1, 3)
    assert (second.output_tokens, second.output_tokens_per_second) == (18, 4.0)


def test_the_live_rate_forgets_what_is_long_ago() -> None:
    tally = Tally(1)
    rates = []
    for second in range(10):
        tally.take(0, num_sent=1, num_running=1, num_texts=100 * min(second, 5), max_send_lag_seconds=0)
        rates.append(tally.progress(Phase.MEASURING, float(second), max_requests=None, max_seconds=9).output_tokens_per_second)
    assert (rates[0], rates[4], rates[9]) == (0.0, 100.0, 0.0)


def test_phases_follow_the_clock() -> None:
    timed = wanted(duration_seconds=10.0, warm_up_seconds=2.0, cool_down_seconds=1.0)
    phases = [phase_at(timed, at).value for at in (0.0, 1.9, 2.0, 8.9, 9.0, 10.0)]
    assert phases == ["warm-up", "warm-up", "measuring", "measuring", "cool-down", "draining"]
    assert phase_at(wanted(num_requests=5, cool_down_seconds=1.0), 99.0) is Phase.MEASURING


@pytest.mark.parametrize(
    ("settings", "wall", "window"),
    [
        (wanted(), 7.0, (0.0, 7.0)),
        (wanted(warm_up_seconds=1.0, cool_down_seconds=2.0), 7.0, (1.0, 5.0)),
        (wanted(duration_seconds=10.0), 14.0, (0.0, 10.0)),
        (wanted(duration_seconds=10.0, warm_up_seconds=1.0, cool_down_seconds=2.0), 14.0, (1.0, 8.0)),
        (wanted(duration_seconds=10.0, cool_down_seconds=1.0), 4.0, (0.0, 3.0)),
        (wanted(warm_up_seconds=5.0, cool_down_seconds=5.0), 7.0, (5.0, 5.0)),
        (wanted(warm_up_seconds=9.0), 7.0, (7.0, 7.0)),
    ],
)
def test_windows(settings: RunSettings, wall: float, window: tuple[float, float]) -> None:
    assert measured_window(settings, wall) == window


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (wanted(num_clients=None), "number of clients"),
        (wanted(num_clients=0), "number of clients"),
        (wanted(num_requests=0), "number of requests"),
        (wanted(duration_seconds=0.0), "duration"),
        (wanted(duration_seconds=float("nan")), "duration"),
        (wanted(timeout_seconds=0.0), "time-out"),
        (wanted(warm_up_seconds=-1.0), "negative"),
        (wanted(duration_seconds=3.0, warm_up_seconds=2.0, cool_down_seconds=1.0), "leave nothing"),
    ],
)
def test_settings_that_cannot_be_run_are_told_in_words(settings: RunSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_settings(settings)


def test_the_plan_s_own_options_are_saved_and_warm_connections_bounded() -> None:
    plan = LoadPlan(
        settings=wanted(arrival="poisson", rate=1000.0, extra={"a": "b"}),
        requests=[],
        path="/v1/completions",
        opens_new_connections=True,
        max_outstanding=7,
    )
    assert load_extra(plan) == {"a": "b", "new_connections": "true", "max_outstanding": "7"}
    assert client_setup(plan, 0, None, 2).num_warm_connections == 0
    plan.opens_new_connections = False
    setup = client_setup(plan, 0, None, 2)
    assert (setup.num_warm_connections, setup.max_outstanding, setup.warm_url) == (32, 4, "http://x/v1/models")


def test_a_client_backs_off_after_a_refusal_and_only_then() -> None:
    assert back_off_seconds(ended(Outcome.COMPLETED)) == 0.0
    refused = ended(Outcome.REFUSED)
    assert back_off_seconds(refused) == 0.1
    refused.retry_after = 3.0
    assert back_off_seconds(refused) == 3.0
    refused.retry_after = 300.0
    assert back_off_seconds(refused) == 5.0
    refused.retry_after = 0.0
    assert back_off_seconds(refused) == 0.1
    broken = ended(Outcome.FAILED)
    broken.chunk_times = [1.0]
    assert back_off_seconds(broken) == 0.0


def test_retry_after_as_seconds_or_date() -> None:
    at = 784111777.0  # Sun, 06 Nov 1994 08:49:37 GMT
    assert retry_after_seconds("3", at) == 3.0
    assert retry_after_seconds("Sun, 06 Nov 1994 08:49:47 GMT", at) == 10.0
    assert retry_after_seconds("Sun, 06 Nov 1994 08:49:00 GMT", at) == 0.0
    assert [retry_after_seconds(value, at) for value in (None, "", "soon", "-1", "²")] == [None] * 5
