import asyncio

import pytest

from headrace.gateway.deltas import GenerationSpec, RequestOrigin
from headrace.ipc.channel import ChannelError
from headrace.ipc.ring import RecordTooLarge, RingCorrupt
from headrace.protocol.control import WorkerExited, WorkerStarted
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import EventBatch, GatewayHello, Usage, WorkerHello
from headrace.protocol.sampling import SamplingParams, StopConditions

SECOND = 1_000_000_000


def refusal_of(call):
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value


def test_text_comes_out_and_ends_once(gateway, make_sequence, read_all):
    stream = gateway.submit("hi", tenant_id="other", service_class="batch", priority=3, cache_salt="s")
    (request,) = gateway.requests
    assert request.prompt_token_ids == [104, 105]
    assert (request.tenant_id, request.priority, request.cache_salt, request.reply_ring) == ("other", 3, "s", 0)
    assert request.service_class == "batch"
    assert request.request_id == stream.request_id == 7 << 40
    sequence = make_sequence(gateway, stream)
    sequence.say("Par", first_scheduled_ns=5)
    sequence.say("is")
    sequence.end(FinishReason.LENGTH, "!")
    (delta,) = read_all(stream)
    assert (delta.text, delta.num_tokens, delta.finish_reason, delta.error) == ("Paris!", 6, "length", None)
    assert delta.usage == Usage(2, 6, 1, 0)
    assert gateway.ended == {"length": 1}
    assert gateway.value("headrace_request_generation_tokens") == (1, 6)
    with pytest.raises(RuntimeError):
        asyncio.run(stream.next_delta())


def test_ids_are_never_the_clients_and_never_repeat(gateway):
    """SCH-14"""
    ids = [gateway.submit().request_id for _ in range(5)]
    assert len(set(ids)) == 5
    assert ids == sorted(ids)


def test_a_consumer_that_waits_is_woken_once_for_a_batch(gateway, make_sequence):
    async def scenario():
        stream = gateway.submit()
        sequence = make_sequence(gateway, stream)
        waiting = asyncio.create_task(stream.next_delta())
        await asyncio.sleep(0)
        gateway.deliver(EventBatch(1, 1, [sequence.event("a")]), EventBatch(1, 2, [sequence.event("b")]))
        first = await waiting
        sequence.end(FinishReason.LENGTH)
        last = await stream.next_delta()
        return first, last

    first, last = asyncio.run(scenario())
    assert (first.text, first.num_tokens, first.finish_reason) == ("ab", 2, None)
    assert (last.text, last.finish_reason) == ("", "length")


def test_a_second_consumer_is_refused(gateway):
    async def scenario():
        stream = gateway.submit()
        waiting = asyncio.create_task(stream.next_delta())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one consumer"):
            await stream.next_delta()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        again = asyncio.create_task(stream.next_delta())  # the first one has gone: the place is free
        await asyncio.sleep(0)
        stream.cancel()
        return await again

    assert asyncio.run(scenario()).error is not None


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_token_that_ends_a_sequence_is_hidden_but_counted(gateway, make_sequence, read_all, skip_special_tokens):
    stream = gateway.submit(skip_special_tokens=skip_special_tokens)
    make_sequence(gateway, stream).end(FinishReason.STOP, [111, 107, 256])
    (delta,) = read_all(stream)
    assert (delta.text, delta.finish_reason, delta.usage.num_output_tokens) == ("ok", "stop", 3)
    assert delta.num_tokens == 3


def test_characters_split_over_tokens_stay_whole(gateway, make_sequence, read_all):
    """UTF-01, UTF-02: no half characters in any delta, an unfinished one at the end is left out."""
    stream = gateway.submit()
    sequence = make_sequence(gateway, stream)

    async def deltas():
        seen = []
        for byte in "é🫠".encode():
            sequence.say([byte])
            if stream._unread:
                seen.append((await stream.next_delta()).text)
        sequence.end(FinishReason.LENGTH, [0xF0, 0x9F])
        return [*seen, (await stream.next_delta()).text]

    assert asyncio.run(deltas()) == ["é", "🫠", ""]


def test_a_stop_string_ends_the_request_and_cancels_the_sequence(gateway, make_sequence, read_all):
    """STP-01: nothing of the stop string is shown; the worker is told; what still comes is ignored."""
    stream = gateway.submit(stop_strings=("5, 6",))
    sequence = make_sequence(gateway, stream)
    for character in "4, 5, 6":
        sequence.say(character)
    assert gateway.cancelled_ids == [stream.request_id]
    sequence.say(", 7")
    sequence.end(FinishReason.CANCELLED)
    (delta,) = read_all(stream)
    assert (delta.text, delta.finish_reason, delta.stop_string) == ("4, ", "stop", "5, 6")
    assert delta.usage.num_output_tokens == delta.num_tokens == 7
    assert gateway.ended == {"stop": 1}
    assert gateway.value("headrace_request_generation_tokens") == (1, 7)
    assert gateway.service.demux.num_unknown_events == 2


def test_usage_at_a_stop_string_counts_to_the_token_that_completed_it(gateway, make_sequence, read_all):
    stream = gateway.submit(stop_strings=("b",), include_stop_string=True)
    sequence = make_sequence(gateway, stream)
    sequence.say("a", usage=Usage(2, 1, 2))  # a worker may tell the cached tokens early
    sequence.say("xbyz")
    (delta,) = read_all(stream)
    assert (delta.text, delta.usage) == ("axb", Usage(2, 3, 2, 0))
    assert delta.num_tokens == 3


def test_a_stop_string_completed_by_the_last_token_is_a_stop(gateway, make_sequence, read_all):
    stream = gateway.submit(stop_strings=("end",))
    make_sequence(gateway, stream).end(FinishReason.LENGTH, "the end")
    (delta,) = read_all(stream)
    assert (delta.text, delta.finish_reason, delta.stop_string) == ("the ", "stop", "end")
    assert gateway.cancelled_ids == []  # it has ended there as well


def test_a_stop_string_that_never_occurs_changes_nothing(gateway, make_sequence, read_all):
    """STP-08"""
    outcomes = []
    for stops in ((), ("zzz", "lo w0")):
        stream = gateway.submit(stop_strings=stops)
        sequence = make_sequence(gateway, stream)
        for character in "hello w":
            sequence.say(character)
        sequence.end(FinishReason.LENGTH, "o")
        deltas = read_all(stream)
        outcomes.append("".join(delta.text for delta in deltas))
        outcomes.append((deltas[-1].usage, sum(delta.num_tokens for delta in deltas)))
    assert outcomes[:2] == outcomes[2:]
    assert outcomes[0] == "hello wo"


def test_no_stop_string_counts_before_min_tokens(gateway, make_sequence, read_all):
    stream = gateway.submit(stop_strings=("ab",), min_tokens=3)
    make_sequence(gateway, stream).say("abxabz")
    (delta,) = read_all(stream)
    assert (delta.text, delta.usage.num_output_tokens) == ("abx", 5)


def test_cancel_frees_everything_at_once(gateway, make_sequence):
    """DIS-01, USE-04: entry and permit are free, the abort is counted once with what was produced."""
    stream = gateway.submit()
    sequence = make_sequence(gateway, stream)
    sequence.say("abc")
    stream.cancel()
    stream.cancel()
    assert gateway.cancelled_ids == [stream.request_id]
    assert gateway.service.num_running == gateway.admission.num_in_flight == gateway.admission.num_queued_prompt_tokens == 0
    sequence.end(FinishReason.CANCELLED)
    assert gateway.ended == {"abort": 1}
    assert gateway.value("headrace_request_prompt_tokens") == (1, 2)
    assert gateway.value("headrace_request_generation_tokens") == (1, 3)


def test_cancel_before_the_first_token(gateway):
    """DIS-02: one that waits is cancelled like one that runs."""
    gateway.submit()
    queued = gateway.submit()
    queued.cancel()
    assert gateway.cancelled_ids == [queued.request_id]
    assert gateway.admission.num_queued_prompt_tokens == 2


def test_cancel_after_the_end_is_nothing(gateway, make_sequence, read_all):
    stream = gateway.submit()
    make_sequence(gateway, stream).end(FinishReason.LENGTH, "x")
    stream.cancel()
    assert gateway.cancelled_ids == []
    assert read_all(stream)[-1].finish_reason == "length"


def test_whoever_waits_when_a_request_is_cancelled_is_told(gateway):
    async def scenario():
        stream = gateway.submit()
        waiting = asyncio.create_task(stream.next_delta())
        await asyncio.sleep(0)
        stream.cancel()
        return await waiting

    assert asyncio.run(scenario()).error is not None


def test_500_streams_broken_off_leave_nothing(gateway, make_sequence):
    """DIS-04, DIS-10: entries, permits and waiting text are back at their start values."""
    for _ in range(500):
        stream = gateway.submit()
        make_sequence(gateway, stream).say("ab")
        stream.cancel()
    assert gateway.service.num_running == gateway.admission.num_in_flight == gateway.service.outbound.num_waiting == 0
    assert len(gateway.cancelled_ids) == gateway.ended["abort"] == gateway.value("headrace_requests_started_total") == 500


def test_breaking_one_off_leaves_the_others_unchanged(gateway, make_sequence, read_all):
    """DIS-05"""
    streams = [gateway.submit() for _ in range(8)]
    sequences = [make_sequence(gateway, stream) for stream in streams]
    for step in range(20):
        gateway.deliver(EventBatch(1, step, [sequence.event(chr(97 + step)) for sequence in sequences]))
        if step == 7:
            streams[3].cancel()
    gateway.deliver(EventBatch(1, 21, [sequence.event("", FinishReason.LENGTH) for sequence in sequences]))
    texts = {"".join(delta.text for delta in read_all(stream)) for stream in streams if stream is not streams[3]}
    assert texts == {"abcdefghijklmnopqrst"}


def test_a_cancellation_that_finds_the_ring_full_is_sent_later(gateway, make_sequence):
    stream, other = gateway.submit(), gateway.submit()
    gateway.ring.room = len(gateway.ring.messages)
    stream.cancel()
    assert gateway.cancelled_ids == []
    error = refusal_of(gateway.submit)
    assert error.code is ErrorCode.OVERLOADED
    gateway.ring.room += 5
    make_sequence(gateway, other).say("x")  # any wake-up
    assert gateway.cancelled_ids == [stream.request_id]
    gateway.submit()


def test_a_full_ring_is_an_answer_not_a_wait(gateway):
    gateway.ring.room = 0
    error = refusal_of(gateway.submit)
    assert error.code is ErrorCode.OVERLOADED
    assert error.retry_after_seconds >= 1
    assert gateway.admission.num_in_flight == gateway.value("headrace_requests_started_total") == 0


def test_a_request_too_large_for_the_ring_is_refused(gateway):
    def refuse(_message):
        raise RecordTooLarge("9 bytes")

    gateway.ring.send_nowait = refuse
    assert refusal_of(gateway.submit).code is ErrorCode.CONTENT_TOO_LARGE
    assert gateway.admission.num_in_flight == 0


def test_admission_is_bounded(make_gateway):
    gateway = make_gateway(max_in_flight=2)
    first, _second = gateway.submit(), gateway.submit()
    assert refusal_of(gateway.submit).code is ErrorCode.OVERLOADED
    first.cancel()
    gateway.submit()


@pytest.mark.parametrize(
    ("finish", "fields", "code", "counted"),
    [
        (FinishReason.ERROR, {"error_code": "execution_failed", "error_message": "m"}, ErrorCode.EXECUTION_FAILED, "error"),
        (FinishReason.ERROR, {"error_code": "no such code"}, ErrorCode.INTERNAL, "error"),
        (FinishReason.DEADLINE, {}, ErrorCode.DEADLINE_EXCEEDED, "deadline"),
        (FinishReason.CANCELLED, {}, ErrorCode.INTERNAL, "error"),
    ],
)
def test_a_failed_request_keeps_its_text_and_gets_one_error(gateway, make_sequence, read_all, finish, fields, code, counted):
    """SSE-02: tokens already made are not lost; then exactly one error, and no finish_reason."""
    stream = gateway.submit()
    sequence = make_sequence(gateway, stream)
    sequence.say("abc")
    sequence.end(finish, **fields)
    text, last = read_all(stream)
    assert (text.text, text.error, text.finish_reason) == ("abc", None, None)
    assert (last.text, last.error.code, last.finish_reason) == ("", code, None)
    assert gateway.ended == {counted: 1}


def test_sch_16_whose_time_is_over_is_told_when_to_come_again(gateway, make_sequence, read_all):
    """As many seconds as admission would tell one that it refuses now: nothing was measured yet, so one window."""
    stream = gateway.submit()
    make_sequence(gateway, stream).end(FinishReason.DEADLINE, error_message="It has waited too long.")
    (last,) = read_all(stream)
    assert (last.error.code, last.error.message) == (ErrorCode.DEADLINE_EXCEEDED, "It has waited too long.")
    assert last.error.retry_after_seconds == gateway.admission.retry_after_seconds(gateway.clock.now_ns()) == 10


@pytest.mark.parametrize("first_index", [0, 2, 99])
def test_lost_or_repeated_events_end_the_request(gateway, make_sequence, read_all, first_index):
    broken, whole = gateway.submit(), gateway.submit()
    sequence, other = make_sequence(gateway, broken), make_sequence(gateway, whole)
    sequence.say("a")
    sequence.num_tokens = first_index
    gateway.deliver(EventBatch(1, 1, [sequence.event("b"), other.event("ok", FinishReason.LENGTH)]))
    assert [delta.error and delta.error.code for delta in read_all(broken)] == [None, ErrorCode.INTERNAL]
    assert read_all(whole)[-1].text == "ok"
    assert gateway.cancelled_ids == [broken.request_id]
    assert gateway.service.demux.num_broken_sequences == 1


def test_a_fault_in_one_text_does_not_reach_the_others(gateway, make_sequence, read_all):
    bad, good = gateway.submit(), gateway.submit()
    bad_sequence, good_sequence = make_sequence(gateway, bad), make_sequence(gateway, good)
    bad.text = None  # whatever is done with it raises
    gateway.deliver(EventBatch(1, 1, [bad_sequence.event("x"), good_sequence.event("ok", FinishReason.LENGTH)]))
    assert read_all(bad)[-1].error.code is ErrorCode.INTERNAL
    assert read_all(good)[-1].text == "ok"


def test_a_dead_workers_requests_end_with_one_error(gateway, make_sequence, read_all):
    streams = [gateway.submit() for _ in range(3)]
    done = make_sequence(gateway, streams[0])
    # What it said before it died is on the ring and not yet read.
    gateway.receiver.inbox.append(EventBatch(1, 1, [done.event("x", FinishReason.LENGTH)]))
    gateway.service.worker_exited(WorkerExited(1, "killed", 0.5))
    assert read_all(streams[0])[-1].finish_reason == "length"
    for stream in streams[1:]:
        (last,) = read_all(stream)
        assert last.error.code is ErrorCode.WORKER_LOST
        assert "again" in last.error.message
    assert gateway.service.readiness().code is ErrorCode.NOT_READY
    assert refusal_of(gateway.submit).code is ErrorCode.NOT_READY
    gateway.service.worker_started(WorkerStarted(2, 1))
    gateway.greet(epoch=2)
    assert gateway.service.readiness() is None
    assert gateway.service.limits().max_num_seqs == 4
    assert gateway.value("headrace_worker_restarts_total") == 1


def test_stale_messages_are_ignored(gateway, make_sequence, read_all):
    gateway.greet(epoch=2)
    stream = gateway.submit()
    make_sequence(gateway, stream, epoch=1).say("old")
    gateway.greet(epoch=1)
    assert gateway.worker_view.epoch == 2
    make_sequence(gateway, stream, epoch=2).end(FinishReason.LENGTH, "new")
    assert read_all(stream)[-1].text == "new"
    assert gateway.service.num_stale_messages == 2


def test_a_new_workers_greeting_ends_what_its_predecessor_had(gateway, make_sequence, read_all):
    """The rings may be faster than the supervisor's message."""
    old = gateway.submit()
    gateway.greet(epoch=2)
    assert gateway.greetings == [GatewayHello(0, old.request_id + 1)]  # whatever strayed to the new worker is cancelled
    new = gateway.submit()
    gateway.service.worker_exited(WorkerExited(1, "killed", 0.0))
    assert read_all(old)[-1].error.code is ErrorCode.WORKER_LOST
    make_sequence(gateway, new, epoch=2).end(FinishReason.LENGTH, "x")
    assert read_all(new)[-1].finish_reason == "length"


def test_a_greeting_repeated_ends_nothing(gateway):
    gateway.submit()
    gateway.greet(epoch=1)
    assert gateway.service.num_running == 1
    assert gateway.greetings == []


@pytest.mark.parametrize(
    "error",
    [ChannelError("bad record", ring=0, num_undecodable=1, request_id=None), RingCorrupt("bad header")],
    ids=["one record", "the whole ring"],
)
def test_when_records_are_lost_no_stream_waits_for_them(gateway, read_all, error):
    stream = gateway.submit()
    gateway.deliver(error)
    assert read_all(stream)[-1].error.code is ErrorCode.INTERNAL
    assert gateway.greetings == [GatewayHello(0, stream.request_id + 1)]


def test_a_new_gateway_drops_what_was_meant_for_its_predecessor(make_gateway):
    gateway = make_gateway()
    gateway.receiver.inbox.append(WorkerHello(9, "m", None))
    gateway.service.start()
    assert gateway.receiver.inbox == []
    assert gateway.greetings == [GatewayHello(0, 7 << 40)]


def test_draining_refuses_new_work_and_lets_the_rest_end(gateway, make_sequence, read_all):
    """OPS-01"""

    async def scenario():
        stream = gateway.submit()
        gateway.service.begin_drain(20.0)
        for call in (gateway.submit, gateway.service.limits):
            error = refusal_of(call)
            assert (error.code, error.retry_after_seconds) == (ErrorCode.DRAINING, 20)
        assert gateway.service.readiness().code is ErrorCode.DRAINING
        idle = asyncio.create_task(gateway.service.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        make_sequence(gateway, stream).end(FinishReason.LENGTH, "x")
        await asyncio.wait_for(idle, 5)
        await gateway.service.wait_idle()
        return stream

    assert read_all(asyncio.run(scenario()))[-1].finish_reason == "length"


def test_what_is_left_is_ended_with_an_error(gateway, read_all):
    streams = [gateway.submit() for _ in range(3)]
    assert gateway.service.end_all() == 3
    assert {read_all(stream)[-1].error.code for stream in streams} == {ErrorCode.DRAINING}
    assert gateway.cancelled_ids == [stream.request_id for stream in streams]
    assert gateway.service.end_all() == 0


def test_a_worker_without_progress_is_not_ready(gateway):
    """DIS-07"""
    gateway.clock.advance(31)
    assert gateway.service.readiness().code is ErrorCode.NOT_READY
    assert refusal_of(gateway.submit).code is ErrorCode.NOT_READY


def test_arrival_may_lie_before_the_submission(gateway):
    spec = GenerationSpec([1], SamplingParams(), StopConditions(1), origin=RequestOrigin(received_ns=5))
    stream = gateway.service.submit(spec)
    assert gateway.requests[0].arrival_ns == 5
    stream.cancel()


def test_counts_agree_whatever_the_requests_end(gateway, make_sequence):
    """MET-04, MET-07: first tokens once each, gaps one fewer than tokens, and as many ends as starts."""
    lengths = [0, 1, 2, 5]
    for index, length in enumerate(lengths):
        stream = gateway.submit()
        sequence = make_sequence(gateway, stream)
        for _ in range(length):
            gateway.clock.advance(0.02)
            sequence.say("a", first_scheduled_ns=gateway.clock.now_ns())
        if index % 2:
            stream.cancel()
        else:
            sequence.end(FinishReason.LENGTH, "bcd")
    stopped = gateway.submit(stop_strings=("x",))
    make_sequence(gateway, stopped).say("abxyz")
    assert gateway.value("headrace_time_to_first_token_seconds")[0] == 5
    assert gateway.value("headrace_request_queue_time_seconds")[0] == 5
    tokens_of_each = [3, 1, 5, 5, 3]
    assert gateway.value("headrace_inter_token_latency_seconds")[0] == sum(tokens_of_each) - 5
    assert gateway.value("headrace_request_generation_tokens") == (5, sum(tokens_of_each))
    assert gateway.value("headrace_e2e_request_latency_seconds")[0] == 3
    assert gateway.ended == {"length": 2, "abort": 2, "stop": 1}
    assert gateway.value("headrace_requests_started_total") == 5
    assert gateway.value("headrace_metrics_faults_total") == 0
    body, content_type = gateway.service.metrics_exposition()
    assert b"headrace_requests_started_total 5.0" in body
    assert content_type.startswith("text/plain")


def test_what_the_surface_counts_is_shown(gateway):
    gateway.service.count_http("/v1/models", 200)
    gateway.service.count_rejection("overloaded")
    body, _ = gateway.service.metrics_exposition()
    assert b'headrace_http_requests_total{route="/v1/models",status="200"} 1.0' in body
    assert b'headrace_admission_rejections_total{code="overloaded"} 1.0' in body
