from headrace.gateway.outbound import Outbound
from headrace.protocol.messages import CancelRequest, GatewayHello, GenerationRequest
from headrace.protocol.sampling import SamplingParams, StopConditions


class BoundedSender:
    def __init__(self):
        self.room = 0
        self.sent = []

    def send_nowait(self, message):
        if len(self.sent) >= self.room:
            return False
        self.sent.append(message)
        return True


def request(request_id):
    return GenerationRequest(request_id, "t", 0, [1], SamplingParams(), StopConditions(1), 0, 0, "", 0, "m")


def test_a_cancellation_waits_for_room_and_keeps_its_order():
    sender = BoundedSender()
    outbound = Outbound(sender)
    outbound.send(CancelRequest(5))
    outbound.send(CancelRequest(1))
    assert (outbound.num_waiting, outbound.flush()) == (2, False)
    sender.room = 1
    assert not outbound.flush()
    sender.room = 10
    outbound.send(CancelRequest(2))
    assert sender.sent == [CancelRequest(5), CancelRequest(1), CancelRequest(2)]
    assert outbound.flush()


def test_no_new_request_passes_while_something_waits():
    """So what waits stays bounded by the requests in flight."""
    sender = BoundedSender()
    outbound = Outbound(sender)
    outbound.send(CancelRequest(1))
    assert not outbound.offer(request(2))
    assert outbound.num_waiting == 1
    sender.room = 1
    assert not outbound.offer(request(2))  # the cancellation took the room
    assert sender.sent == [CancelRequest(1)]
    sender.room = 2
    assert outbound.offer(request(2))


def test_what_waits_for_a_dead_worker_is_forgotten():
    outbound = Outbound(BoundedSender())
    outbound.send(CancelRequest(1))
    outbound.discard()
    assert outbound.flush()


def test_a_greeting_takes_the_place_of_what_waits():
    sender = BoundedSender()
    outbound = Outbound(sender)
    for number in range(5):
        outbound.send(CancelRequest(number))
        outbound.send(GatewayHello(0, 10))
    assert outbound.num_waiting == 1
    sender.room = 1
    assert outbound.flush()
    assert sender.sent == [GatewayHello(0, 10)]
