"""What the measuring costs: metrics, timelines, stalls and records, switched on and off in turn within one run.

    python bench/measuring_cost.py [--rounds 7]

gateway: CPU per token of whole requests (64 streams of 200 tokens) through the real service over a real ring, with a record
being written, against the same with stand-ins that measure nothing. worker: microseconds of a step through the real loop with
an executor that computes nothing, with metrics, stalls and step log, against stand-ins; and what part that is of a step of the
default model (25 ms for one row, 34 for 8, 60 for 32: docs/lab.md; for 64 rows the time of 32, which is less than theirs).
The status page is written in every step, as it is when steps take 20 ms or more. Log lines are made and written as in a server,
to a file that is thrown away. What is not switched off: reading the clock, and the fields of events.
"""

import argparse
import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable
from unittest import mock

from gateway_stages import Gateway
from harness import median, table
from headrace.gateway.deltas import GenerationSpec
from headrace.ipc.status import StatusPage
from headrace.launch.model import prepare_model
from headrace.launch.settings import ModelSettings, Settings
from headrace.protocol.graph import TOKENIZER_FILE
from headrace.protocol.lifecycle import FinishReason
from headrace.protocol.messages import EventBatch, GenerationRequest, TokenEvent, Usage, WorkerHello
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.record import RecordHeader
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.step import StepPlan, StepResult
from headrace.protocol.traffic import TrafficPolicy
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.scheduling.stalls import StallWatch
from headrace.telemetry.journal import Journal
from headrace.telemetry.logs import configure_logging
from headrace.telemetry.recorder import GatewayRecording, Recorder, create_record
from headrace.telemetry.status_fields import STATUS_FIELDS
from headrace.telemetry.timeline import RequestTimeline
from headrace.testing import InMemoryEventSink, InMemoryRequestSource
from headrace.text.tokenizer import TextTokenizer
from headrace.worker.loop import WorkerLoop
from headrace.worker.outbox import Outbox
from headrace.worker.report import WorkerReport
from headrace.worker.step_log import StepLog

STEP_MS = {1: 25.0, 8: 34.0, 32: 60.0, 64: 60.0}
NUM_STREAMS, NUM_TOKENS = 64, 200


def nothing(*_args: object, **_kwargs: object) -> None:
    return None


def header() -> RecordHeader:
    return RecordHeader(
        started_unix=time.time(),
        started_monotonic_ns=time.monotonic_ns(),
        model="m",
        classes=list(TrafficPolicy().class_names),
        num_tenants=2,
        enable_prefix_caching=True,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=8192,
    )


def gateway_run(tokenizer: TextTokenizer, folder: pathlib.Path, number: int, *, measures: bool) -> float:
    """CPU microseconds per token of requests from submit to end."""
    gateway = Gateway(tokenizer)
    recording = None
    if measures:
        target = create_record(folder / f"gateway{number}.jsonl", header(), 1 << 30)
        recording = GatewayRecording(target, TrafficPolicy(), gateway=1, first_request_id=1 << 40)
        gateway.service._tracker._journal._listeners = (recording,)
    spec = GenerationSpec(list(range(1, 257)), SamplingParams(), StopConditions(NUM_TOKENS, ignore_eos=True))
    words = range(1000, 1400)
    started = time.process_time()
    streams = [gateway.service.submit(spec) for _ in range(NUM_STREAMS)]
    submitted = time.process_time() - started
    steps = []
    for step in range(NUM_TOKENS):
        is_last = step == NUM_TOKENS - 1
        reason, usage = (FinishReason.LENGTH, Usage(256, NUM_TOKENS)) if is_last else (None, None)
        events = [
            TokenEvent(stream.request_id, step, [words[(step * 7 + n) % 400]], finish_reason=reason, usage=usage)
            for n, stream in enumerate(streams)
        ]
        steps.append(EventBatch(1, 0, events))
    started = time.process_time()
    for batch in steps:
        gateway.sink.publish_nowait(0, batch)
        gateway.service.on_events()
    spent = time.process_time() - started + submitted
    assert gateway.service.num_running == 0
    if recording is not None:
        recording.close()
    return spent / (NUM_STREAMS * NUM_TOKENS) * 1e6


def unmeasured(run: Callable[[], float]) -> float:
    """The run with timelines, journal and stall watch that do nothing."""
    timeline = ("start", "count_tokens", "end", "note_stalls", "note_usage", "note_preempted", "note_cut_off", "_begin")
    journal = ("accepted", "refused", "finished")
    watch = ("queue", "begin_step", "admit", "preempt", "end_step", "land", "share", "progress", "cut")
    patches = [
        mock.patch.object(owner, name, nothing)
        for owner, names in ((RequestTimeline, timeline), (Journal, journal), (StallWatch, watch))
        for name in names
        if hasattr(owner, name)
    ]
    for patch in patches:
        patch.start()
    try:
        return run()
    finally:
        for patch in patches:
            patch.stop()


class Idle:
    """An executor that computes nothing."""

    spec = ExecutorSpec("m", "kv", 50_000, frozenset(), 8192, 32, 8192)

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step_id, {row.request_id: 7 for row in plan.rows if row.samples}, {}, forward_ns=1, sample_ns=1)

    def close(self) -> None:
        return None


class Clock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


class NoReport(WorkerReport):
    """Counts and shows nothing."""

    def count_step(self, *_args: object) -> None:
        return None

    def is_due(self, now_ns: int) -> bool:
        return False

    def write(self, *_args: object, **_kwargs: object) -> None:
        return None


class Sink(InMemoryEventSink):
    def hello(self, hello: WorkerHello) -> bool:
        return True


def worker_run(num_rows: int, folder: pathlib.Path, number: int, *, measures: bool, num_steps: int = 400) -> float:
    """Microseconds of a step."""
    executor, clock = Idle(), Clock()
    scheduler = Scheduler(SchedulerConfig(64, 256, 8192), executor.spec)
    source, sink = InMemoryRequestSource(), Sink()
    log = None
    if measures:
        target = create_record(folder / f"worker{num_rows}-{number}.jsonl", header(), 1 << 30)
        log = StepLog(Recorder(target), 1, scheduler.limits, clock.now_ns())
    page = StatusPage.create(bytearray(StatusPage.size_bytes(STATUS_FIELDS)), STATUS_FIELDS)
    report = (WorkerReport if measures else NoReport)(page.write, epoch=1, pid=1)
    loop = WorkerLoop(
        scheduler,
        executor,
        source,
        Outbox(sink, [0], WorkerHello(1, "m", scheduler.limits)),
        clock,
        report,
        step_log=log,
    )
    for request_id in range(num_rows):
        stopping = StopConditions(num_steps + 50, ignore_eos=True)
        now_ns = time.monotonic_ns()
        source.push_nowait(GenerationRequest(request_id, "t", 0, [1, 2, 3], SamplingParams(), stopping, now_ns, 0, "", 0, "m"))
    for _ in range(30):
        loop.step()
        sink.drain_nowait(0)
    spent = 0.0
    for _ in range(num_steps):
        report.note_wait()  # the page is due
        started = time.process_time()
        loop.step()
        spent += time.process_time() - started
        sink.drain_nowait(0)
    return spent / num_steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    model = prepare_model(Settings(model=ModelSettings(model="sim:"))).folder
    tokenizer = TextTokenizer.from_file(f"{model}/{TOKENIZER_FILE}")
    configure_logging("json")
    rows = []
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(contextlib.redirect_stderr(stack.enter_context((folder / "log").open("w"))))
        on, off = [], []
        for number in range(rounds):
            on.append(gateway_run(tokenizer, folder, number, measures=True))
            off.append(unmeasured(lambda: gateway_run(tokenizer, folder, 0, measures=False)))
        added = median([with_it - without for with_it, without in zip(on, off, strict=True)])
        rows.append(["gateway, per token", f"{median(on):.2f}", f"{median(off):.2f}", f"{added:.2f}", "at most 2 us"])
        for num_rows, step_ms in STEP_MS.items():
            on, off = [], []
            for number in range(rounds):
                on.append(worker_run(num_rows, folder, number, measures=True))
                off.append(unmeasured(lambda rows=num_rows: worker_run(rows, folder, 0, measures=False)))
            added = median([with_it - without for with_it, without in zip(on, off, strict=True)])
            part = f"{added / step_ms / 10:.2f} % of {step_ms:.0f} ms, at most 2 %"
            rows.append([f"worker, a step of {num_rows} rows", f"{median(on):.1f}", f"{median(off):.1f}", f"{added:.1f}", part])
    print(table(["CPU us", "on", "off", "added (median of pairs)", "target"], rows))


if __name__ == "__main__":
    main()
