import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import EventBatch, TokenEvent, Usage, WorkerHello, WorkerLimits
from headrace.protocol.stalls import Stall, StallCause
from headrace.worker.outbox import MAX_BATCH_BYTES, MAX_STALLS, Outbox, merge_events

HELLO = WorkerHello(3, "m", WorkerLimits(100, 64, 4, 8, 16))


class RefusingSink:
    def __init__(self, rings=(0,)):
        self.room = dict.fromkeys(rings, 0)
        self.greeted = set()
        self.greetings = []
        self.batches = {ring: [] for ring in rings}

    def hello(self, hello):
        for ring, room in self.room.items():
            if ring not in self.greeted and room > 0:
                self.room[ring] -= 1
                self.greeted.add(ring)
                self.greetings.append((ring, hello))
        return self.greeted == set(self.room)

    def forget_greeting(self, reply_ring):
        self.greeted.discard(reply_ring)

    def publish_nowait(self, reply_ring, batch):
        if self.room[reply_ring] <= 0:
            return False
        self.room[reply_ring] -= 1
        self.batches[reply_ring].append(batch)
        return True

    def events(self, ring=0):
        return [event for batch in self.batches[ring] for event in batch.events]


def test_merging_keeps_indices_and_the_end():
    first = TokenEvent(7, 0, [1], first_scheduled_ns=5)
    last = TokenEvent(7, 1, [2, 3], finish_reason=FinishReason.LENGTH, usage=Usage(1, 3))
    merged = merge_events(first, last)
    assert merged == TokenEvent(7, 0, [1, 2, 3], finish_reason=FinishReason.LENGTH, usage=Usage(1, 3), first_scheduled_ns=5)


def stall(began_ns, duration_ns=300):
    return Stall(StallCause.SLOW_STEP, began_ns, duration_ns)


def test_merging_keeps_the_stalls_of_both():
    merged = merge_events(TokenEvent(7, 0, [1], stalls=(stall(1),)), TokenEvent(7, 1, [2], stalls=(stall(500), stall(900))))
    assert merged.stalls == (stall(1), stall(500), stall(900))


@given(st.lists(st.lists(st.integers(1, 50), max_size=3), min_size=1, max_size=12))
def test_merged_events_lose_no_stall_up_to_the_bound_and_then_the_shortest(steps):
    sink = RefusingSink()
    outbox = Outbox(sink, [0], HELLO)
    told = []
    for index, durations in enumerate(steps):
        stalls = tuple(stall(1000 * index + 100 * place, duration) for place, duration in enumerate(durations))
        told += stalls
        outbox.add(0, [TokenEvent(1, index, [index], stalls=stalls)], emitted_ns=index)
        assert not outbox.flush()
    sink.room[0] = 9
    assert outbox.flush()
    (event,) = sink.events()
    kept = list(event.stalls)
    assert kept == [stall for stall in told if stall in kept]  # none is made up, and the order is kept
    assert len(kept) == min(len(told), MAX_STALLS)
    by_length = sorted((stall.duration_ns for stall in told), reverse=True)
    assert sorted((stall.duration_ns for stall in kept), reverse=True) == by_length[: len(kept)]


def test_a_preemption_is_told_until_later_tokens_make_it_old():
    preempted = TokenEvent(7, 3, [], stalls=(stall(1),), is_preempted=True)
    token = TokenEvent(7, 3, [4], stalls=(stall(500),))
    end = TokenEvent(7, 3, [], finish_reason=FinishReason.CANCELLED, usage=Usage(1, 3))
    assert merge_events(preempted, token) == TokenEvent(7, 3, [4], stalls=(stall(1), stall(500)))
    assert merge_events(preempted, preempted).is_preempted
    assert not merge_events(preempted, end).is_preempted
    # Tokens wait already: which of the two came last could not be told, and the tokens must not be lost.
    merged = merge_events(TokenEvent(7, 2, [1]), preempted)
    assert (merged.first_index, merged.token_ids, merged.is_preempted) == (2, [1], False)


def test_refused_events_are_kept_and_merged_per_request():
    sink = RefusingSink()
    outbox = Outbox(sink, [0], HELLO)
    for index in range(50):
        outbox.add(0, [TokenEvent(1, index, [index]), TokenEvent(2, index, [100 + index])], emitted_ns=index)
        assert not outbox.flush()
    assert outbox.num_pending_events == 2
    sink.room[0] = 2
    assert outbox.flush()
    assert outbox.is_empty
    assert sink.batches[0] == [
        EventBatch(3, 49, [TokenEvent(1, 0, list(range(50))), TokenEvent(2, 0, list(range(100, 150)))]),
    ]


def test_one_full_ring_does_not_hold_up_another():
    sink = RefusingSink(rings=(0, 1))
    sink.room = {0: 0, 1: 9}
    outbox = Outbox(sink, [0, 1], HELLO)
    outbox.add(0, [TokenEvent(1, 0, [1])], 1)
    outbox.add(1, [TokenEvent(2, 0, [1])], 1)
    assert not outbox.flush()
    assert sink.greetings == [(1, HELLO)]
    assert sink.events(1) == [TokenEvent(2, 0, [1])]
    sink.room[0] = 9
    assert outbox.flush()


def test_a_new_gateway_is_greeted_and_spared_its_predecessors_events():
    sink = RefusingSink()
    sink.room[0] = 1
    outbox = Outbox(sink, [0], HELLO)
    outbox.flush()
    outbox.add(0, [TokenEvent(1, 0, [1]), TokenEvent(1000, 0, [1])], 1)
    assert not outbox.flush()
    outbox.greet_again(0, first_request_id=1000)
    sink.room[0] = 9
    assert outbox.flush()
    assert sink.greetings == [(0, HELLO), (0, HELLO)]
    assert [event.request_id for event in sink.events()] == [1000]


def test_batches_stay_small_and_resume_where_the_ring_was_full():
    sink = RefusingSink()
    outbox = Outbox(sink, [0], HELLO)
    stalls = tuple(Stall(StallCause.WORKER_BUSY, 2**62, 2**62) for _ in range(MAX_STALLS))
    events = [TokenEvent(number, 0, [2**17] * 5000) for number in range(10)]
    events += [TokenEvent(number, 0, [2**17], stalls=stalls) for number in range(10, 300)]
    outbox.add(0, events, 1)
    sink.room[0] = 3
    assert not outbox.flush()
    sink.room[0] = 99
    assert outbox.flush()
    assert sink.events() == events
    assert max(len(msgspec.msgpack.encode(batch)) for batch in sink.batches[0]) <= MAX_BATCH_BYTES


@given(st.data())
def test_whatever_the_room_every_token_goes_out_once_and_in_order(data):
    sink = RefusingSink()
    outbox = Outbox(sink, [0], HELLO)
    made = {1: 0, 2: 0, 3: 0}
    for _ in range(data.draw(st.integers(1, 25))):
        step = []
        for request_id in data.draw(st.lists(st.sampled_from(sorted(made)), unique=True)):
            step.append(TokenEvent(request_id, made[request_id], [made[request_id]]))
            made[request_id] += 1
        outbox.add(0, step, 1)
        sink.room[0] = data.draw(st.integers(0, 2))
        outbox.flush()
    sink.room[0] = 99
    assert outbox.flush()
    for request_id, num_tokens in made.items():
        events = [event for event in sink.events() if event.request_id == request_id]
        assert [token for event in events for token in event.token_ids] == list(range(num_tokens))
        assert [event.first_index for event in events] == [event.token_ids[0] for event in events]
