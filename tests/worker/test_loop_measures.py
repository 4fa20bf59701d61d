"""What the worker's loop measures of its steps: stages, counts, the status page's writes, and the lines of a record."""

import dataclasses

import msgspec
import pytest

from headrace.protocol.messages import CancelRequest
from headrace.protocol.record import RecordStep, RecordWorker
from headrace.protocol.stalls import StallCause
from headrace.telemetry.metric import STEP_STAGES
from headrace.telemetry.status_fields import HISTOGRAMS, STATUS_FIELDS, blocked_by_number
from headrace.worker.report import PAGE_INTERVAL_NS
from headrace.worker.step_log import StepLog
from tests.worker.test_loop import Worker, request

US = 1000
MS = 1_000_000


class Sink:
    """A record in memory. It is `full` after so many lines."""

    def __init__(self, full=10**9):
        self.lines = []
        self.num_lines = self.num_drops = 0
        self.flushes_ns = []
        self.full = full

    @property
    def is_open(self):
        return self.num_lines < self.full

    def at_us(self, at_ns):
        return (at_ns - 1_000_000_000) // US

    def write(self, line):
        self.lines.append(line)
        self.num_lines += 1

    def flush_due(self, now_ns):
        self.flushes_ns.append(now_ns)


class TimedWorker(Worker):
    """Each part of a step takes the time that `costs` gives it; nothing else takes any."""

    def __init__(self, costs_us=None, sink=None, **options):
        super().__init__(**options)
        self.costs_ns = {stage: (costs_us or {}).get(stage, 0) * US for stage in STEP_STAGES}
        self.num_padding_tokens = 0
        self._slow(self.source, "drain_nowait", "receive")
        self._slow(self.scheduler, "schedule", "schedule")
        self._slow(self.scheduler, "apply", "apply")
        self._slow(self.sink, "publish_nowait", "publish")
        execute = self.executor.execute

        def timed_execute(plan):
            result = execute(plan)
            costs = self.costs_ns
            self.clock.advance_ns(costs["execute_other"] + costs["forward"] + costs["sample"])
            return dataclasses.replace(
                result,
                forward_ns=costs["forward"],
                sample_ns=costs["sample"],
                num_padding_tokens=self.num_padding_tokens,
            )

        self.executor.execute = timed_execute
        if sink is not None:
            self.loop._step_log = StepLog(sink, 3, self.scheduler.limits, self.clock.now_ns())

    def _slow(self, owner, name, stage):
        inner = getattr(owner, name)

        def slow(*arguments):
            self.clock.advance_ns(self.costs_ns[stage])
            return inner(*arguments)

        setattr(owner, name, slow)

    def step(self, times=1):
        for _ in range(times):
            self.loop.step()
            self.collect()

    def page(self):
        """The page as of now."""
        self.loop.write_page(self.clock.now_ns())
        return self.pages[-1]


def counts(page, prefix):
    return [page[f"{prefix}_bucket_{index}"] for index in range(len(HISTOGRAMS[prefix]) + 1)]


COSTS_US = {
    "receive": 11,
    "schedule": 130,
    "execute_other": 170,
    "forward": 5000,
    "sample": 190,
    "apply": 230,
    "publish": 29,
}


def test_met_11_each_stage_is_counted_once_for_all_rows_and_together_they_are_the_step():
    """MET-11: eight requests in a step count its time once."""
    worker = TimedWorker(COSTS_US)
    worker.send(*[request(number, max_tokens=4) for number in range(1, 9)])
    worker.step(3)
    page = worker.page()
    assert page["num_steps"] == 3
    for stage, cost_us in COSTS_US.items():
        assert page[f"stage_{stage}_sum"] == 3 * cost_us * US
        assert sum(counts(page, f"stage_{stage}")) == 3
    assert page["step_duration_sum"] == 3 * sum(COSTS_US.values()) * US == 3 * 5760 * US
    assert sum(counts(page, "step_duration")) == 3
    assert counts(page, "step_rows")[3] == 3  # at most 8, more than 4
    assert page["step_rows_sum"] == 24
    assert (page["num_prefill_tokens"], page["num_decode_tokens"]) == (24, 16)
    assert page["iteration_tokens_sum"] == 40


def test_an_executor_that_claims_more_time_than_passed_makes_no_negative_stage():
    worker = TimedWorker({"forward": 100})
    worker.send(request(1))
    execute = worker.executor.execute
    worker.executor.execute = lambda plan: dataclasses.replace(execute(plan), forward_ns=150 * US)
    worker.step()
    page = worker.page()
    assert (page["stage_execute_other_sum"], page["stage_forward_sum"]) == (0, 150 * US)


def test_a_failed_step_is_counted_and_took_its_time():
    worker = TimedWorker({"receive": 7})

    def fail(plan):
        worker.clock.advance_ns(40 * US)
        raise RuntimeError("device lost")

    worker.executor.execute = fail
    worker.send(request(1))
    worker.step()
    page = worker.page()
    assert (page["num_steps"], page["stage_execute_other_sum"], page["stage_forward_sum"]) == (1, 40 * US, 0)
    assert page["step_duration_sum"] == 47 * US


def test_padding_evictions_and_full_rings_are_shown():
    worker = TimedWorker({"forward": 50_000})
    worker.num_padding_tokens = 5
    for number in range(1, 31):  # prompts of 40 tokens in a pool of 256: cached blocks are evicted
        worker.send(request(number, [number] * 40, max_tokens=1))
        worker.step()
        if number % 7 == 0:
            worker.loop.write_page(worker.clock.now_ns())
    worker.sink.refuse(0)
    worker.send(request(99))
    worker.step()
    page = worker.page()
    assert page["num_padding_tokens"] == 31 * 5
    assert page["num_evictions"] > 20
    assert sum(counts(page, "block_lifetime")) == sum(counts(page, "block_idle")) == page["num_evictions"]
    assert page["block_lifetime_sum"] == page["block_idle_sum"] > page["num_evictions"] * 200 * MS
    assert page["num_event_ring_full"] == 1


def test_classes_and_what_blocks_admission_are_shown():
    worker = TimedWorker(max_num_seqs=2)
    for number, name in enumerate(["batch", "interactive", "interactive", "standard"], 1):
        worker.send(msgspec.structs.replace(request(number), service_class=name))
    worker.step()
    page = worker.page()
    assert [page[f"num_running_class_{index}"] for index in range(8)] == [2, 0, 0, 0, 0, 0, 0, 0]
    assert [page[f"num_waiting_class_{index}"] for index in range(8)] == [0, 1, 1, 0, 0, 0, 0, 0]
    assert page["blocked_by"] == blocked_by_number(StallCause.NO_SLOT) == list(StallCause).index(StallCause.NO_SLOT) + 1
    worker.run_dry()
    page = worker.page()
    assert page["blocked_by"] == 0
    assert not any(page[f"num_{what}_class_{index}"] for what in ("running", "waiting") for index in range(8))
    assert set(page) == set(STATUS_FIELDS)


class TestPageWrites:
    def test_short_steps_share_a_write(self):
        """A hundred steps of a millisecond: a write in each twentieth, and none is older than the interval."""
        worker = TimedWorker({"forward": 1000})
        worker.send(request(1, max_tokens=200))
        oldest_ns = 0
        for _ in range(100):
            worker.step()
            oldest_ns = max(oldest_ns, worker.clock.now_ns() - worker.pages[-1]["heartbeat_ns"])
        assert len(worker.pages) == 5
        assert oldest_ns < PAGE_INTERVAL_NS

    def test_long_steps_are_each_shown(self):
        worker = TimedWorker({"forward": 20_000})
        worker.send(request(1, max_tokens=50))
        worker.step(10)
        assert [page["num_steps"] for page in worker.pages] == list(range(1, 11))

    def test_before_a_wait_and_at_the_first_step_after_it(self):
        worker = TimedWorker({"forward": 10})
        worker.send(request(1, max_tokens=3))
        worker.step(3)
        assert [page["num_steps"] for page in worker.pages] == [1]
        worker.step()
        worker.loop.wait_message()
        assert (worker.pages[-1]["num_steps"], worker.pages[-1]["num_running"]) == (3, 0)
        worker.send(request(2, max_tokens=3))
        worker.loop.wait_message()  # a message is there: no time passes
        worker.step()
        assert (worker.pages[-1]["num_steps"], worker.pages[-1]["num_running"]) == (4, 1)

    def test_a_worker_that_gives_itself_up_shows_its_last_numbers(self):
        worker = TimedWorker(max_failed_steps=1)
        worker.send(request(1, max_tokens=50))
        worker.step(5)
        worker.executor.fail_next_step = RuntimeError("device lost")
        with pytest.raises(RuntimeError, match="failed in a row"):
            worker.step()
        assert (worker.pages[-1]["num_generated_tokens"], worker.pages[-1]["num_running"]) == (5, 0)


class TestRecord:
    def test_a_line_for_the_worker_and_one_for_each_step(self):
        sink = Sink()
        worker = TimedWorker(COSTS_US, sink)
        worker.send(request(1, [5, 6, 7], max_tokens=10))
        worker.step()
        worker.send(request(2, [8, 9, 10, 11, 12], max_tokens=10))
        worker.step()
        about, first, second = sink.lines
        assert about == RecordWorker(at_us=0, epoch=3, num_blocks=64, block_size=4)
        assert first == RecordStep(
            at_us=0,
            epoch=3,
            duration_us=5760,
            forward_us=5000,
            sample_us=190,
            decode_rows=0,
            prefill_rows=1,
            prefill_tokens=3,
            context_tokens=3,
            running=1,
            waiting=0,
        )
        assert (second.at_us, second.decode_rows, second.prefill_rows, second.prefill_tokens) == (5760, 1, 1, 5)
        assert (second.context_tokens, second.running) == (4 + 5, 2)
        page = worker.page()
        assert (page["num_record_lines"], page["num_record_drops"]) == (3, 0)

    def test_lines_that_the_record_does_not_take_are_counted(self):
        sink = Sink(full=3)
        worker = TimedWorker(sink=sink)
        worker.send(request(1, max_tokens=10))
        worker.step(7)
        page = worker.page()
        assert (page["num_record_lines"], page["num_record_drops"], len(sink.lines)) == (3, 5, 3)

    def test_a_step_that_failed_has_no_line_and_a_wait_flushes(self):
        sink = Sink()
        worker = TimedWorker(sink=sink)
        worker.executor.fail_next_step = RuntimeError("once")
        worker.send(request(1))
        worker.step()
        worker.send(CancelRequest(1))
        worker.step()
        worker.loop.wait_message()
        assert len(sink.lines) == 1
        assert sink.flushes_ns == [worker.clock.now_ns() - 1_000_000_000]
