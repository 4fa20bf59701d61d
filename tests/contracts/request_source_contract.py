"""What every RequestSource must do. A test class inherits RequestSourceContract and gives the fixture `source_link`."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.protocol.messages import CancelRequest, GatewayHello, GatewayMessage, GenerationRequest
from headrace.protocol.ports import RequestSource
from headrace.protocol.sampling import SamplingParams, StopConditions


@dataclass
class SourceLink:
    """A source and a way to send to it: `send(message)` is False when there is no room."""

    source: RequestSource
    send: Callable[[GatewayMessage], bool]


def request(request_id: int, num_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        tenant_id="täñänt",
        priority=-1,
        prompt_token_ids=[1 + index * 1000 for index in range(num_tokens)],
        sampling=SamplingParams(temperature=0.5, seed=2**63 - 1, logit_bias={7: -100.0}),
        stopping=StopConditions(max_tokens=5, stop_token_ids=(2, 3)),
        arrival_ns=2**62,
        deadline_ns=0,
        cache_salt="salt\0",
        reply_ring=0,
        model_id="model",
    )


class RequestSourceContract:
    def test_nothing_there(self, source_link: SourceLink):
        assert source_link.source.drain_nowait(10) == []
        assert source_link.source.wait_message(0) is False

    def test_messages_come_whole_and_in_order(self, source_link: SourceLink):
        sent: list[GatewayMessage] = [GatewayHello(0, 1 << 40), request(1 << 40), CancelRequest(1 << 40), request(2, 1)]
        assert all(source_link.send(message) for message in sent)
        assert source_link.source.drain_nowait(10) == sent
        assert source_link.source.drain_nowait(10) == []

    def test_the_limit_holds_and_the_rest_is_still_there(self, source_link: SourceLink):
        sent = [CancelRequest(number) for number in range(5)]
        assert all(source_link.send(message) for message in sent)
        assert source_link.source.drain_nowait(2) == sent[:2]
        assert source_link.source.wait_message(0) is True
        assert source_link.source.drain_nowait(2) == sent[2:4]
        assert source_link.source.drain_nowait(2) == sent[4:]
        assert source_link.source.wait_message(0) is False

    def test_a_limit_of_nothing(self, source_link: SourceLink):
        source_link.send(CancelRequest(1))
        assert source_link.source.drain_nowait(0) == []
        assert source_link.source.wait_message(0) is True

    def test_a_message_ends_the_wait_again_and_again(self, source_link: SourceLink):
        for number in range(3):
            assert source_link.send(CancelRequest(number))
            assert source_link.source.wait_message(60) is True
            assert source_link.source.drain_nowait(10) == [CancelRequest(number)]
            assert source_link.source.wait_message(0) is False

    def test_it_is_bounded_and_what_was_taken_stays_whole(self, source_link: SourceLink):
        num_taken = 0
        while num_taken < 1_000_000 and source_link.send(request(num_taken, 100)):
            num_taken += 1
        assert 0 < num_taken < 1_000_000
        received: list[GatewayMessage] = []
        while messages := source_link.source.drain_nowait(64):
            received += messages
        assert received == [request(number, 100) for number in range(num_taken)]
        assert source_link.send(request(0)) is True
