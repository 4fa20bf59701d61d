import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.admission import AdmissionControl, AdmissionLimits
from headrace.gateway.drain import WINDOW_SECONDS, EventRate
from headrace.protocol.errors import ErrorCode, RequestError

SECOND = 1_000_000_000


def control(max_in_flight=2, max_queued_prompt_tokens=100):
    return AdmissionControl(AdmissionLimits(max_in_flight, max_queued_prompt_tokens))


def refused(admission, num_prompt_tokens, now_ns):
    with pytest.raises(RequestError) as caught:
        admission.admit(num_prompt_tokens, now_ns)
    return caught.value


def test_a_burst_is_cut_exactly_at_the_limit():
    """SCH-17: of 20 at once exactly as many as fit are accepted."""
    admission = control(max_in_flight=5)
    outcomes = []
    for _ in range(20):
        try:
            admission.admit(1, SECOND)
            outcomes.append(True)
        except RequestError:
            outcomes.append(False)
    assert outcomes == [True] * 5 + [False] * 15
    last = refused(admission, 1, SECOND)
    assert last.code is ErrorCode.OVERLOADED
    assert 1 <= last.retry_after_seconds <= 60


def test_a_released_permit_makes_room_once():
    admission = control(max_in_flight=1)
    permit = admission.admit(10, SECOND)
    refused(admission, 1, SECOND)
    permit.release(2 * SECOND, completed=True)
    permit.release(2 * SECOND, completed=True)
    assert (admission.num_in_flight, admission.num_queued_prompt_tokens) == (0, 0)
    admission.admit(10, 2 * SECOND)
    refused(admission, 1, 2 * SECOND)


def test_prompt_tokens_count_until_the_first_token():
    admission = control(max_in_flight=10, max_queued_prompt_tokens=100)
    first = admission.admit(80, SECOND)
    refused(admission, 30, SECOND)
    first.leave_queue(SECOND)
    second = admission.admit(30, SECOND)
    assert admission.num_queued_prompt_tokens == 30
    first.release(SECOND, completed=True)
    second.release(SECOND, completed=True)
    assert admission.num_queued_prompt_tokens == 0


def test_a_prompt_longer_than_the_bound_enters_an_empty_queue():
    admission = control(max_queued_prompt_tokens=10)
    admission.admit(1000, SECOND)
    assert refused(admission, 1, SECOND).code is ErrorCode.OVERLOADED


def test_retry_after_follows_the_completion_rate_and_the_crowd():
    admission = control(max_in_flight=20)
    permits = [admission.admit(1, SECOND) for _ in range(20)]
    for permit in permits:
        permit.release(SECOND, completed=True)  # 20 in the window: 2 each second
    assert admission.retry_after_seconds(SECOND) == 1
    for _ in range(20):
        admission.admit(1, SECOND)
    retries = [refused(admission, 1, SECOND).retry_after_seconds for _ in range(30)]
    assert retries == sorted(retries)
    assert retries[-1] == 15  # 30 callers, 2 places each second


def test_retry_after_without_any_completion_is_bounded():
    admission = control(max_in_flight=1)
    admission.admit(1, SECOND)
    assert refused(admission, 1, SECOND).retry_after_seconds == WINDOW_SECONDS
    for _ in range(100):
        last = refused(admission, 1, SECOND)
    assert last.retry_after_seconds == 60


def test_aborted_requests_are_no_completions():
    admission = control(max_in_flight=5)
    for permit in [admission.admit(1, SECOND) for _ in range(5)]:
        permit.release(SECOND, completed=False)
    assert admission.retry_after_seconds(SECOND) == WINDOW_SECONDS


@given(st.lists(st.integers(0, 25 * SECOND), max_size=60))
def test_rate_counts_what_lies_in_the_window(gaps):
    rate = EventRate()
    seconds = []
    now_ns = 0
    for gap in gaps:
        now_ns += gap
        seconds.append(now_ns // SECOND)
        rate.count(now_ns)
        assert rate.num_recent(now_ns) == sum(1 for second in seconds if second > seconds[-1] - WINDOW_SECONDS)
    assert rate.num_recent(now_ns + (WINDOW_SECONDS + 1) * SECOND) == 0
