"""Traffic, servers and records for the simulator's tests."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.protocol.record import RecordArrival, RecordEnd, RecordHeader, RecordLine, RecordStep, RecordWorker
from headrace.protocol.traffic import TrafficPolicy
from headrace.simulation.engine import Clients, Outcome, Simulation
from headrace.simulation.policies import CURRENT, Machine, Policy, Refusal, ServerAdmission
from headrace.simulation.requests import SimulatedRequest
from headrace.simulation.settings import ServerSettings
from headrace.simulation.step_model import StepModel

MS = 1_000_000


def request(index: int, due_ms: float = 0.0, prompt: int = 4, output: int = 3, **more: object) -> SimulatedRequest:
    fields: dict[str, object] = {"max_tokens": output} | more
    return SimulatedRequest(  # type: ignore[arg-type]
        index=index, due_ns=round(due_ms * MS), prompt_tokens=prompt, output_tokens=output, **fields
    )


def machine(step_model: StepModel | None = None, **server: object) -> Machine:
    return ServerSettings(**server).machine(step_model or StepModel(step_ms=10, row_us=0, token_us=0, kv_ns=0), TrafficPolicy())  # type: ignore[arg-type]


@dataclass
class StepLog:
    """What each step held, when it ended, and how long it took: (decode rows, prefill tokens, context, ns, end)."""

    steps: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def admission(self, at: Machine) -> "LoggingAdmission":
        return LoggingAdmission(at, self)


class LoggingAdmission(ServerAdmission):
    def __init__(self, at: Machine, log: StepLog) -> None:
        super().__init__(at)
        self._log = log

    def note_step(self, decode_rows: int, prefill_tokens: int, context_tokens: int, duration_ns: int, now_ns: int) -> None:
        self._log.steps.append((decode_rows, prefill_tokens, context_tokens, duration_ns, now_ns - 1_000_000_000))


class RefusingTwice:
    """Refuses each request's first two tries, and says 5 s."""

    def __init__(self, at: Machine) -> None:
        self._tries: dict[int, int] = {}

    def decide(self, request: SimulatedRequest, now_ns: int) -> Refusal | None:
        self._tries[request.index] = self._tries.get(request.index, 0) + 1
        return Refusal(5_000 * MS) if self._tries[request.index] <= 2 else None

    def note_step(self, decode_rows: int, prefill_tokens: int, context_tokens: int, duration_ns: int, now_ns: int) -> None: ...

    def note_first_token(self, request: SimulatedRequest, now_ns: int) -> None: ...

    def note_end(self, request: SimulatedRequest, now_ns: int, *, completed: bool) -> None: ...


def run(requests: list[SimulatedRequest], at: Machine, policy: Policy = CURRENT, max_tries: int = 1) -> Outcome:
    return Simulation(requests, policy, at, Clients(max_tries)).run()


def record_of(path: Path, requests: list[SimulatedRequest], model: StepModel, server: ServerSettings) -> Path:
    """The record that a server of exactly that speed would have written."""
    log = StepLog()
    policy = Policy("logged", "", admission=log.admission)
    outcome = run(requests, server.machine(model, TrafficPolicy()), policy)
    lines: list[RecordLine] = [
        RecordHeader(
            started_unix=0.0,
            started_monotonic_ns=0,
            model="m",
            classes=list(TrafficPolicy().class_names),
            num_tenants=2,
            max_num_seqs=server.max_num_seqs,
            max_num_batched_tokens=server.max_num_batched_tokens,
            max_model_len=server.max_model_len,
        ),
        RecordWorker(at_us=0, epoch=1, num_blocks=server.num_blocks, block_size=server.block_size),
    ]
    for item in outcome.finished:
        asked = item.request
        arrival_us = item.arrival_ns // 1000
        lines.append(
            RecordArrival(
                at_us=arrival_us,
                id=asked.request_id,
                gateway=1,
                class_index=1,
                tenant_index=0,
                priority=0,
                prompt_tokens=asked.prompt_tokens,
                max_tokens=asked.max_tokens,
            )
        )
        lines.append(
            RecordEnd(
                at_us=item.end_ns // 1000,
                id=asked.request_id,
                gateway=1,
                output_tokens=len(item.token_ns),
                cached_tokens=item.num_cached_tokens,
                preemptions=item.num_preemptions,
                reason=item.reason,
                queue_us=(item.first_scheduled_ns - item.arrival_ns) // 1000,
                ttft_us=(item.token_ns[0] - item.arrival_ns) // 1000,
                last_token_us=(item.token_ns[-1] - item.arrival_ns) // 1000,
            )
        )
    for decode_rows, prefill_tokens, context_tokens, duration_ns, end_ns in log.steps:
        lines.append(
            RecordStep(
                at_us=(end_ns - duration_ns) // 1000,
                epoch=1,
                duration_us=duration_ns // 1000,
                forward_us=0,
                sample_us=0,
                decode_rows=decode_rows,
                prefill_rows=int(prefill_tokens > 0),
                prefill_tokens=prefill_tokens,
                context_tokens=context_tokens,
                running=0,
                waiting=0,
            )
        )
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path
