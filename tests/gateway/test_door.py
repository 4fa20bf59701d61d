"""The door: estimates of prompts that nobody has tokenized, calls as one applicant, time on places, what a scrape shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.deltas import CallOutline, GenerationSpec, RequestOrigin
from headrace.gateway.door import FIRST_CHARS_PER_TOKEN, TokenEstimate
from headrace.gateway.drain import PlaceMeter, mean_place_ns
from headrace.gateway.promises import MAX_PROMISES, Promise, PromiseBook
from headrace.protocol.errors import ErrorCode, RejectReason, RequestError
from headrace.protocol.sampling import SamplingParams, StopConditions

SECOND = 1_000_000_000


def test_the_estimate_follows_what_was_tokenized() -> None:
    estimate = TokenEstimate()
    assert estimate.tokens_of(400) == 400 / FIRST_CHARS_PER_TOKEN
    assert (estimate.tokens_of(0), estimate.tokens_of(1)) == (0, 1)
    for _ in range(300):
        estimate.learn(2000, 1000)
    assert estimate.tokens_of(1000) == pytest.approx(500, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30), st.integers(1, 10**7))
def test_the_estimate_lies_between_the_ratios_seen(texts: list[tuple[int, int]], num_chars: int) -> None:
    estimate = TokenEstimate()
    ratios = [1 / FIRST_CHARS_PER_TOKEN]
    for chars, tokens in texts:
        estimate.learn(chars, tokens)
        ratios += [tokens / chars] if chars and tokens else []
    assert min(ratios) * num_chars * 0.999 - 1 <= estimate.tokens_of(num_chars) <= max(ratios) * num_chars * 1.001 + 1


def spec(num_tokens: int = 2, **fields) -> GenerationSpec:  # type: ignore[no-untyped-def]
    return GenerationSpec([1] * num_tokens, SamplingParams(), StopConditions(10), **fields)


def test_a_call_that_can_never_be_held_is_the_callers_fault(make_gateway) -> None:  # type: ignore[no-untyped-def]
    gateway = make_gateway(max_in_flight=3, max_num_seqs=2)
    gateway.service.check_admission(CallOutline(num_sequences=3, num_chars=10))
    with pytest.raises(RequestError) as caught:
        gateway.service.check_admission(CallOutline(num_sequences=4, num_chars=10))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_VALUE, "n")


def test_a_call_is_started_whole_or_not_at_all(make_gateway) -> None:  # type: ignore[no-untyped-def]
    gateway = make_gateway(max_in_flight=3, max_num_seqs=3)
    streams = gateway.service.submit_call([spec(), spec()])
    with pytest.raises(RequestError) as caught:
        gateway.service.submit_call([spec(), spec()])
    assert caught.value.reject_reason is RejectReason.QUEUE_FULL
    assert (len(gateway.requests), gateway.admission.num_in_flight, gateway.cancelled_ids) == (2, 2, [])
    streams[0].cancel()
    assert len(gateway.service.submit_call([spec(), spec()])) == 2


def test_a_ring_that_fills_in_the_middle_of_a_call_takes_all_of_it_back(make_gateway) -> None:  # type: ignore[no-untyped-def]
    gateway = make_gateway()
    gateway.ring.room = 2
    with pytest.raises(RequestError) as caught:
        gateway.service.submit_call([spec(), spec(), spec()])
    assert caught.value.code is ErrorCode.OVERLOADED
    assert gateway.service.num_running == gateway.admission.num_in_flight == gateway.admission.num_queued_prompt_tokens == 0
    gateway.ring.room = 100
    gateway.service.on_events()
    assert gateway.cancelled_ids == [request.request_id for request in gateway.requests]


def test_the_timeout_is_a_deadline_from_the_arrival(gateway) -> None:  # type: ignore[no-untyped-def]
    gateway.clock.advance(5)
    gateway.service.submit(spec(timeout_ns=2 * SECOND, origin=RequestOrigin(received_ns=4 * SECOND)))
    gateway.service.submit(spec())
    assert [request.deadline_ns for request in gateway.requests] == [6 * SECOND, 0]


def test_a_scrape_shows_the_predicted_wait_and_the_promises(make_gateway, make_sequence) -> None:  # type: ignore[no-untyped-def]
    gateway = make_gateway(max_num_seqs=1)

    def samples() -> dict[str, float]:
        lines = gateway.service.metrics_exposition()[0].decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    wait = 'headrace_predicted_wait_seconds{class="%s"}'
    assert samples()[wait % "standard"] == samples()["headrace_admission_promises"] == 0
    first = make_sequence(gateway, gateway.service.submit(spec(100)))
    gateway.clock.advance(1)
    first.say("a")
    gateway.clock.advance(9)
    first.end()
    make_sequence(gateway, gateway.service.submit(spec(100))).say("a")
    assert samples()[wait % "interactive"] == 0  # it takes the place of a standard one
    assert samples()[wait % "standard"] == pytest.approx(9.0, rel=0.01)
    with pytest.raises(RequestError) as caught:
        gateway.service.check_admission(CallOutline(num_token_ids=100, origin=RequestOrigin(digest=b"x")))
    assert caught.value.reject_reason is RejectReason.PREDICTED_TTFT
    assert samples()["headrace_admission_promises"] == 1
    assert len(gateway.requests) == 2


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20))
def test_one_place_after_another_the_mean_is_the_fading_mean(durations: list[int]) -> None:
    meter, now_ns, total, count = PlaceMeter[int](), SECOND, 0.0, 0.0
    for seconds in durations:
        meter.take(0, now_ns)
        now_ns += seconds * SECOND
        meter.give_back(0, now_ns)
        total, count = 0.97 * (total + seconds), 0.97 * (count + 1)
        now_ns += SECOND  # while nobody runs no time is counted
    assert mean_place_ns({1: meter}, 1, now_ns) == pytest.approx(total / count * SECOND)
    assert mean_place_ns({1: meter}, 0, now_ns) == mean_place_ns({1: meter}, 1, now_ns)  # nothing better is known
    assert mean_place_ns({}, 0, now_ns) == 0.0


def test_callers_who_ask_again_and_again_take_no_more_memory() -> None:
    book = PromiseBook()
    for number in range(10 * MAX_PROMISES):
        book.give(Promise(b"%d" % (number % 3), SECOND, (number + 2) * SECOND, 1, 0, "t"))
    assert len(book) == 3
    assert len(book._expiries) <= 2 * MAX_PROMISES


def test_promises_of_prompts_without_tokens_are_counted_as_others() -> None:
    book = PromiseBook()
    for name in (b"a", b"b"):
        book.give(Promise(name, SECOND, 2 * SECOND, 0, 0, "t"))
    book.forget_expired(3 * SECOND)
    assert (len(book), book.tokens_by_tenant(0)) == (0, {})
