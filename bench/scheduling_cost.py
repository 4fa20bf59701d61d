"""What planning costs: microseconds of schedule + apply in each step, without any model.

    python bench/scheduling_cost.py [--rows 256] [--waiting 5000] [--steps 400] [--profile]

places: every place is taken by a stream, and thousands wait with long prompts that share prefixes, of several tenants and
classes. memory: places are left and memory is not, so that the blocked head is asked for in each step, requests end, others
join, and lower classes give way. Tokens come from a list: what is measured is the scheduler with its cache manager alone.
"""

import argparse
import cProfile
import pstats
import random
import time

from harness import median, percentile, table
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.step import StepPlan, StepResult
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, Tenant, TrafficPolicy
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.worker.garbage import keep_pauses_short

BLOCK_SIZE = 32
VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 8192
TENANTS = (DEFAULT_TENANT, OTHER_TENANT, "a", "b", "c", "d")
CLASSES = ("interactive", "standard", "batch")
STEP_NS = 20_000_000


class Load:
    """Requests of a reproducible mix."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(1536) for _ in range(8)]
        self._next_id = 0

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(VOCAB_SIZE) for _ in range(number)]

    def request(self, prompt: list[int], max_tokens: int, service_class: str, now_ns: int) -> GenerationRequest:
        self._next_id += 1
        return GenerationRequest(
            request_id=self._next_id,
            tenant_id=self._random.choice(TENANTS),
            priority=0,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            stopping=StopConditions(max_tokens, ignore_eos=True),
            arrival_ns=now_ns,
            deadline_ns=now_ns + 3_600_000_000_000 if self._next_id % 4 == 0 else 0,
            cache_salt="",
            reply_ring=0,
            model_id="model",
            service_class=service_class,
        )

    def short(self, now_ns: int, max_tokens: int) -> GenerationRequest:
        return self.request(self._tokens(64), max_tokens, self._random.choice(CLASSES), now_ns)

    def long(self, now_ns: int, max_tokens: int) -> GenerationRequest:
        prompt = self._random.choice(self._prefixes) + self._tokens(self._random.randrange(32, 512))
        return self.request(prompt, max_tokens, self._random.choice(CLASSES), now_ns)


class Bench:
    """A scheduler that is driven as the worker's loop does it."""

    def __init__(self, *, max_num_seqs: int, num_blocks: int, max_num_batched_tokens: int) -> None:
        policy = TrafficPolicy(tenants=tuple(Tenant(name=name) for name in TENANTS))
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            traffic=policy,
        )
        spec = ExecutorSpec("model", "none", VOCAB_SIZE, frozenset(), MAX_MODEL_LEN, BLOCK_SIZE, num_blocks)
        self.scheduler = Scheduler(config, spec)
        self.now_ns = 1_000_000_000
        self.schedule_us: list[float] = []
        self.apply_us: list[float] = []
        self.num_rows: list[int] = []
        self.num_decode_rows: list[int] = []

    def step(self) -> StepPlan:
        scheduler = self.scheduler
        self.now_ns += 100_000
        started = time.perf_counter()
        plan = scheduler.schedule(self.now_ns)
        planned = time.perf_counter()
        result = StepResult(plan.step_id, {row.request_id: 7 for row in plan.rows if row.samples})
        self.now_ns += STEP_NS
        executed = time.perf_counter()
        scheduler.apply(plan, result, self.now_ns)
        scheduler.take_events()
        applied = time.perf_counter()
        self.schedule_us.append((planned - started) * 1e6)
        self.apply_us.append((applied - executed) * 1e6)
        self.num_rows.append(len(plan.rows))
        self.num_decode_rows.append(sum(len(row.token_ids) == 1 for row in plan.rows))
        return plan

    def forget(self) -> None:
        """What was measured so far was the way there."""
        for values in (self.schedule_us, self.apply_us, self.num_rows, self.num_decode_rows):
            values.clear()

    def report(self) -> None:
        both = [sum(pair) for pair in zip(self.schedule_us, self.apply_us, strict=True)]
        rows = max(1.0, sum(self.num_rows) / len(self.num_rows))
        print(f"\n{len(both)} steps, {rows:.0f} rows on average, {sum(self.num_decode_rows) / len(both):.0f} of one token")
        lines = [
            [name, f"{median(values):.0f}", f"{percentile(values, 0.99):.0f}", f"{max(values):.0f}"]
            for name, values in (("schedule", self.schedule_us), ("apply", self.apply_us), ("both", both))
        ]
        print(table(["us", "median", "p99", "most"], lines))
        print(f"{median(both) / rows:.2f} us for each row (medians)")
        print(self.scheduler.statistics())


def streams_with_places_full(num_rows: int, num_waiting: int, seed: int) -> Bench:
    """Every place has a stream; those that wait are of the lower classes too, so that nobody gives way."""
    load = Load(seed)
    bench = Bench(max_num_seqs=num_rows, num_blocks=num_rows * 80, max_num_batched_tokens=num_rows * 64 + 256)
    for _ in range(num_rows):
        bench.scheduler.add(load.request(load._tokens(64), 4096, "interactive", bench.now_ns), bench.now_ns)
    while len(bench.step().rows) < num_rows or bench.num_decode_rows[-1] < num_rows:
        pass
    for _ in range(num_waiting):
        bench.scheduler.add(load.long(bench.now_ns, 128), bench.now_ns)
    return bench


def streams_with_memory_full(num_rows: int, num_waiting: int, seed: int) -> Bench:
    """About so many rows fit; requests end and join all the time."""
    load = Load(seed)
    bench = Bench(max_num_seqs=4 * num_rows, num_blocks=num_rows * 16, max_num_batched_tokens=4 * num_rows)
    for index in range(num_waiting):
        request = load.long(bench.now_ns, 256) if index % 2 else load.short(bench.now_ns, 512)
        bench.scheduler.add(request, bench.now_ns)
    for _ in range(150):
        bench.step()
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="say where the time goes (the times are longer then)")
    options = parser.parse_args()
    keep_pauses_short()  # as a worker does
    for name, make in (("places", streams_with_places_full), ("memory", streams_with_memory_full)):
        print(f"\n== {name}: {options.rows} rows, {options.waiting} waiting")
        bench = make(options.rows, options.waiting, options.seed)
        bench.forget()
        profile = cProfile.Profile() if options.profile else None
        if profile is not None:
            profile.enable()
        for _ in range(options.steps):
            bench.step()
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
        bench.report()


if __name__ == "__main__":
    main()
