"""Where the gateway's CPU per token goes: its own stages alone, on the real code, in this process.

    python bench/gateway_stages.py [--streams 64] [--steps 400]

Each line adds a stage to the one before: ring and decoding; demultiplexing, detokenizing, mailbox and metrics; waking the
consumers; making the events and handing them to a `send` that does nothing. What bench/gateway_cost.py measures beyond the
last line is the HTTP server and the kernel's part of a write to each of so many sockets.
"""

import argparse
import asyncio
import time
from collections.abc import Callable

import uvloop

from harness import table
from headrace.gateway.admission import AdmissionControl, AdmissionLimits
from headrace.gateway.deltas import GenerationSpec, ModelCard
from headrace.gateway.http import sse
from headrace.gateway.service import GatewayService
from headrace.gateway.worker_view import WorkerView
from headrace.ipc.channel import EventReceiver, RingEventSink
from headrace.ipc.doorbell import Doorbell
from headrace.ipc.ring import Ring
from headrace.launch.model import prepare_model
from headrace.launch.settings import ModelSettings, Settings
from headrace.protocol.control import WorkerStarted
from headrace.protocol.graph import TOKENIZER_FILE
from headrace.protocol.messages import EventBatch, TokenEvent, WorkerHello, WorkerLimits
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.telemetry.export import MetricsExporter
from headrace.telemetry.meters import GatewayMeters
from headrace.text.tokenizer import TextTokenizer

LIMITS = WorkerLimits(vocab_size=49152, max_model_len=8192, max_num_seqs=1024, num_blocks=8192, block_size=32)


class Clock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


class NoRequests:
    def send_nowait(self, message: object) -> bool:
        return True


class Gateway:
    """The service over a real event ring in this process' memory; what it asks of a worker goes nowhere."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.ring, self.bell = Ring.create(bytearray(1 << 22)), Doorbell.create()
        self.sink = RingEventSink({0: (self.ring, self.bell)})
        receiver = EventReceiver(self.ring, self.bell)
        meters, clock = GatewayMeters(), Clock()
        status = {"heartbeat_ns": clock.now_ns()}
        self.service = GatewayService(
            ModelCard("m", 0, 49152, 8192, None, frozenset({2}), False),
            tokenizer,
            NoRequests(),
            receiver,
            AdmissionControl(AdmissionLimits(4096, 10_000_000)),
            WorkerView(lambda: status, 1e9),
            meters,
            MetricsExporter(meters, lambda: status, {}),
            clock,
            reply_ring=0,
            incarnation=1,
        )
        self.service.start()
        self.service.worker_started(WorkerStarted(1, 1))
        self.sink.hello(WorkerHello(1, "m", LIMITS))
        self.service.on_events()

    def open(self, num_streams: int) -> list:
        spec = GenerationSpec([1, 2, 3], SamplingParams(), StopConditions(100_000, ignore_eos=True))
        return [self.service.submit(spec) for _ in range(num_streams)]


def batches(streams: list, num_steps: int) -> list[EventBatch]:
    words = range(1000, 1400)  # plain words of the embedded model's vocabulary
    return [
        EventBatch(
            1, 0, [TokenEvent(stream.request_id, step, [words[(step * 7 + n) % 400]]) for n, stream in enumerate(streams)]
        )
        for step in range(num_steps)
    ]


def timed(run: Callable[[], None], num_tokens: int) -> float:
    """CPU microseconds per token."""
    started = time.process_time()
    run()
    return (time.process_time() - started) / num_tokens * 1e6


def measure(tokenizer: TextTokenizer, num_streams: int, num_steps: int) -> list[tuple[str, float]]:
    num_tokens = num_streams * num_steps
    found = []

    gateway = Gateway(tokenizer)
    steps = batches(gateway.open(num_streams), num_steps)
    receiver = EventReceiver(gateway.ring, gateway.bell)

    def ring_only() -> None:
        for batch in steps:
            gateway.sink.publish_nowait(0, batch)
            receiver.drain_nowait()

    pushing = timed(lambda: [gateway.sink._encode(batch) for batch in steps], num_tokens)
    found.append(("ring and decoding", timed(ring_only, num_tokens) - pushing))

    def no_consumer() -> None:
        for batch in steps:
            gateway.sink.publish_nowait(0, batch)
            gateway.service.on_events()

    found.append(("+ demultiplex, detokenize, mailbox, metrics", timed(no_consumer, num_tokens) - pushing))

    async def with_consumers(handle: Callable[[], Callable[[str], object]]) -> float:
        gateway = Gateway(tokenizer)
        streams = gateway.open(num_streams)

        async def consume(stream, take: Callable[[str], object]) -> None:
            while True:
                take((await stream.next_delta()).text)

        tasks = [asyncio.create_task(consume(stream, handle())) for stream in streams]
        await asyncio.sleep(0)
        own = batches(streams, num_steps)
        started = time.process_time()
        for batch in own:
            gateway.sink.publish_nowait(0, batch)
            gateway.service.on_events()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        spent = time.process_time() - started
        for task in tasks:
            task.cancel()
        return spent / num_tokens * 1e6 - pushing

    def framer() -> Callable[[str], object]:
        envelope = sse.Envelope("chat.completion.chunk", "chatcmpl-0", 0, "m", "fp", False)
        frames = sse.ChatChoiceFrames(envelope, 0)
        return lambda text: {"type": "http.response.body", "body": frames.text_event(text), "more_body": True}

    found.append(("+ waking the consumers", uvloop.run(with_consumers(lambda: lambda _text: None))))
    found.append(("+ making the events", uvloop.run(with_consumers(framer))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    folder = prepare_model(Settings(model=ModelSettings(model="sim:"))).folder
    tokenizer = TextTokenizer.from_file(f"{folder}/{TOKENIZER_FILE}")
    measure(tokenizer, args.streams, 50)  # warm-up
    rows = [[name, f"{cost:.1f}"] for name, cost in measure(tokenizer, args.streams, args.steps)]
    print(table(["stages, each with those before it", "CPU us/token"], rows))


if __name__ == "__main__":
    main()
