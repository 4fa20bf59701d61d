"""A gateway service over in-memory rings, with a scripted worker at the other end."""

import asyncio
import json

import pytest

from headrace.gateway.admission import AdmissionControl, AdmissionLimits
from headrace.gateway.deltas import GenerationSpec, ModelCard
from headrace.gateway.service import GatewayService
from headrace.gateway.worker_view import WorkerView
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import (
    CancelRequest,
    EventBatch,
    GatewayHello,
    GenerationRequest,
    TokenEvent,
    Usage,
    WorkerHello,
    WorkerLimits,
)
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.accumulate import Histogram, HistogramFamily
from headrace.telemetry.export import MetricsExporter
from headrace.telemetry.meters import GatewayMeters
from headrace.testing.clock import ManualClock
from headrace.text.tokenizer import TextTokenizer

EOS = 256
LIMITS = WorkerLimits(vocab_size=257, max_model_len=4096, max_num_seqs=4, num_blocks=8, block_size=16)


def _byte_alphabet():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(byte for byte in range(256) if byte not in table):
        table[byte] = chr(256 + number)
    return table


@pytest.fixture(scope="session")
def byte_tokenizer_json():
    """tokenizer.json with one token for each byte, its id the byte; 256 ends a sequence."""
    added = {"id": EOS, "content": "<eos>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in _byte_alphabet().items()}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [added],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_json):
    return TextTokenizer.from_json(byte_tokenizer_json)


class FakeRing:
    """Both ends of a request ring: refuses when there is no room."""

    def __init__(self, room=10_000):
        self.room = room
        self.messages = []

    def send_nowait(self, message):
        if len(self.messages) >= self.room:
            return False
        self.messages.append(message)
        return True


class FakeReceiver:
    """The gateway's end of an event ring; an exception in it is raised when its turn comes."""

    def __init__(self):
        self.inbox = []

    def drain_nowait(self):
        taken = []
        while self.inbox:
            item = self.inbox[0]
            if isinstance(item, Exception):
                if not taken:
                    self.inbox.pop(0)
                    raise item
                break
            taken.append(self.inbox.pop(0))
        return taken

    def discard_all(self):
        num_records = len(self.inbox)
        self.inbox.clear()
        return num_records


class Gateway:
    """The service and everything around it that a test turns."""

    def __init__(self, tokenizer, *, max_in_flight=100, max_queued_prompt_tokens=100_000, traffic=None, **limits):
        self.clock = ManualClock()
        self.ring = FakeRing()
        self.receiver = FakeReceiver()
        self.traffic = traffic or TrafficPolicy()
        self.meters = GatewayMeters(traffic=self.traffic)
        self.status = {"heartbeat_ns": self.clock.now_ns()}
        self.admission = AdmissionControl(
            AdmissionLimits(max_in_flight, max_queued_prompt_tokens, traffic=self.traffic, **limits)
        )
        self.worker_view = WorkerView(lambda: self.status, 30.0)
        card = ModelCard("test", 0, 257, 4096, None, frozenset({EOS}), False)
        self.service = GatewayService(
            card,
            tokenizer,
            self.ring,
            self.receiver,
            self.admission,
            self.worker_view,
            self.meters,
            MetricsExporter(self.meters, lambda: None),
            self.clock,
            reply_ring=0,
            incarnation=7,
        )

    def greet(self, epoch=1):
        self.deliver(WorkerHello(epoch, "m", LIMITS))

    def deliver(self, *messages):
        self.receiver.inbox.extend(messages)
        self.service.on_events()

    def submit(self, prompt="hi", *, max_tokens=100, min_tokens=0, **fields):
        stopping = StopConditions(max_tokens, min_tokens)
        return self.service.submit(GenerationSpec(list(prompt.encode()), SamplingParams(), stopping, **fields))

    def sent(self, kind):
        return [message for message in self.ring.messages if isinstance(message, kind)]

    @property
    def requests(self):
        return self.sent(GenerationRequest)

    @property
    def cancelled_ids(self):
        return [message.request_id for message in self.sent(CancelRequest)]

    @property
    def ended(self):
        """How many requests ended, by reason; those that none ended by are left out."""
        counts = self.meters.accumulators["headrace_request_success_total"].values
        return {reason: count for (reason,), count in counts.items() if count}

    def value(self, name):
        """Of a counter; of a histogram its (count, sum)."""
        found = self.meters.accumulators[name]
        return (found.count, found.sum) if isinstance(found, Histogram | HistogramFamily) else found.value

    @property
    def greetings(self):
        return self.sent(GatewayHello)


class Sequence:
    """One sequence as a worker would report it."""

    def __init__(self, gateway, stream, epoch=1):
        self.gateway = gateway
        self.request_id = stream.request_id
        self.epoch = epoch
        self.num_tokens = 0

    def event(self, text="", finish=None, **fields):
        ids = list(text.encode() if isinstance(text, str) else text)
        event = TokenEvent(self.request_id, self.num_tokens, ids, finish_reason=finish, **fields)
        self.num_tokens += len(ids)
        return event

    def say(self, text, **fields):
        self.gateway.deliver(EventBatch(self.epoch, 1, [self.event(text, **fields)]))

    def end(self, finish=FinishReason.LENGTH, text="", **fields):
        usage = Usage(2, self.num_tokens + len(text.encode() if isinstance(text, str) else text), 1, 0)
        self.say(text, finish=finish, usage=usage, **fields)


@pytest.fixture
def gateway(byte_tokenizer):
    ready = Gateway(byte_tokenizer)
    ready.greet()
    ready.ring.messages.clear()
    return ready


@pytest.fixture
def make_gateway(byte_tokenizer):
    def make(**options):
        made = Gateway(byte_tokenizer, **options)
        made.greet()
        made.ring.messages.clear()
        return made

    return make


@pytest.fixture
def make_sequence():
    return Sequence


def read_all(stream):
    """All deltas of a stream that has ended."""

    async def collect():
        deltas = []
        while not deltas or (deltas[-1].finish_reason is None and deltas[-1].error is None):
            deltas.append(await asyncio.wait_for(stream.next_delta(), 5))
        return deltas

    return asyncio.run(collect())


@pytest.fixture(name="read_all")
def read_all_fixture():
    return read_all
