"""A server on paper: from settings to the Run that its load would leave, in no time and without chance beyond the seed."""

import random
from dataclasses import dataclass, field

from headrace.loadtest.records import ClientLoad, Outcome, RequestRecord, Run, RunSettings

IDLE_CLIENT = ClientLoad(
    num_processes=2,
    cpu_cores_used=0.05,
    max_process_cpu_share=0.04,
    send_lag_p50_seconds=0.0002,
    send_lag_p99_seconds=0.001,
    loop_lag_p99_seconds=0.001,
)


@dataclass
class PaperServer:
    """Tokens of one request come every `gap_seconds`, of many at once no faster than `max_tokens_per_second` together."""

    gap_seconds: float = 0.02
    max_tokens_per_second: float = 400.0
    prefill_seconds: float = 0.1
    requests_per_second: float = 10.0  # open loop: requests start one after another, so far apart
    max_queued: int | None = None  # open loop: more that wait are refused
    speed: float = 1.0
    whole_answer_seconds: float = 0.0  # what an answer without streaming takes more
    noise: float = 0.0
    chance: int = 0  # servers that differ in it have different noise
    calls: list[tuple[RunSettings, str]] = field(default_factory=list)

    def __call__(self, settings: RunSettings, label: str) -> Run:
        self.calls.append((settings, label))
        rng = random.Random(f"{self.chance} {settings.seed} {len(self.calls)}")
        records = self._closed(settings, rng) if settings.arrival == "closed" else self._open(settings, rng)
        wall = max((record.ended or record.sent) for record in records) + 1e-6
        window_end = wall if settings.arrival == "closed" else max(records[-1].scheduled + 1e-6, settings.duration_seconds or 0)
        return Run(
            label=label,
            settings=settings,
            wall_seconds=max(wall, window_end),
            window_begin=0.0,
            window_end=window_end,
            client=IDLE_CLIENT,
            requests=records,
        )

    def _record(self, index: int, scheduled: float, first: float, gap: float, settings: RunSettings) -> RequestRecord:
        tokens = settings.output_tokens or 16
        times = [first + gap * place for place in range(tokens)]
        if not settings.is_stream:
            times = [times[-1] + self.whole_answer_seconds]
        return RequestRecord(
            index=index,
            process=index % 2,
            is_stream=settings.is_stream,
            scheduled=scheduled,
            sent=scheduled,
            headers_at=times[0],
            first_event_at=times[0],
            chunk_times=times,
            chunk_chars=[4 if settings.is_stream else 4 * tokens] * len(times),
            ended=times[-1],
            outcome=Outcome.COMPLETED,
            status=200,
            finish_reasons=["length"],
            num_done_marks=1 if settings.is_stream else 0,
            target_prompt_tokens=settings.prompt_tokens,
            target_output_tokens=tokens,
            prompt_tokens=settings.prompt_tokens or 32,
            output_tokens=tokens,
            counted_chunks=len(times),
        )

    def _closed(self, settings: RunSettings, rng: random.Random) -> list[RequestRecord]:
        clients = settings.num_clients or 1
        records = []
        for client in range(clients):
            now = 0.0
            for _ in range(max(1, (settings.num_requests or 20) // clients)):
                slow = (1 + self.noise * rng.uniform(-1, 1)) / self.speed
                gap = max(self.gap_seconds, clients / self.max_tokens_per_second) * slow
                record = self._record(len(records), now, now + self.prefill_seconds * slow, gap, settings)
                record.process = client % 2
                records.append(record)
                now = record.chunk_times[-1]
        return records

    def _open(self, settings: RunSettings, rng: random.Random) -> list[RequestRecord]:
        assert settings.rate is not None
        records: list[RequestRecord] = []
        due = free_at = 0.0
        horizon = settings.duration_seconds or 30.0
        while True:
            due += rng.expovariate(settings.rate)
            if due > horizon and records:
                return records
            start = max(due, free_at)
            if self.max_queued is not None and (start - due) * self.requests_per_second > self.max_queued:
                records.append(
                    RequestRecord(
                        index=len(records),
                        process=0,
                        scheduled=due,
                        sent=due,
                        ended=due + 0.001,
                        outcome=Outcome.REFUSED,
                        status=503,
                        error_kind="http_503",
                        retry_after=1.0,
                    )
                )
                continue
            free_at = start + 1 / (self.requests_per_second * self.speed)
            records.append(self._record(len(records), due, start + self.prefill_seconds, self.gap_seconds, settings))
