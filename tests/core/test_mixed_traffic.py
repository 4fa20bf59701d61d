"""Classes, tenants, shares and preemption joined over a toy server: who waits at most how long, stated and held.

The toy has slots and memory for tokens; a step draws a token for each stream and shares a fixed number of prompt tokens. Each
request reserves memory for all its tokens, so that the only preemptions are those in favour of higher claims.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.claims import Claim, ClaimRules, prefer_cached
from headrace.scheduling.class_queue import ClassQueue
from headrace.scheduling.fairness import TokenCosts, jain_index
from headrace.scheduling.preemption import choose_victims
from headrace.scheduling.prefill_share import share_prefill
from tests.core.claimants import make_rules, request_of

STEP_NS = 1_000
COSTS = TokenCosts(prefill=1.0, output=2.0, cached=0.1)


@dataclass(eq=False)
class Job:
    claim: Claim
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_drawn_tokens: int = 0
    arrival_step: int = 0
    admitted_step: int | None = None
    ended_step: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Of the prompt and what was drawn and is lost."""
        return max(0, self.num_prompt_tokens + self.num_drawn_tokens - self.num_computed_tokens)


@dataclass
class Toy:
    rules: ClaimRules
    num_slots: int
    num_kv_tokens: int
    budget_tokens: int
    min_chunk: int
    quantum: float = 0.0
    step: int = 0
    running: list[Job] = field(default_factory=list)
    num_preemptions: int = 0
    service: Counter[tuple[str, str]] = field(default_factory=Counter)
    next_id: int = 0

    def __post_init__(self) -> None:
        self.queue = ClassQueue[Job](self.rules, COSTS)

    def submit(self, tenant: str, level: int, num_prompt_tokens: int, num_output_tokens: int, num_cached: int = 0) -> Job:
        request = request_of(self.next_id, level=level, tenant=tenant, arrival_ns=self.step * STEP_NS)
        self.next_id += 1
        job = Job(self.rules.claim(request), num_prompt_tokens, num_output_tokens, num_cached, arrival_step=self.step)
        self.queue.add_newcomer(job)
        return job

    def run_step(self) -> None:
        now_ns = self.step * STEP_NS
        self.queue.advance(now_ns)
        while (job := self.next_job(now_ns)) is not None and self.make_room(job, now_ns):
            self.queue.remove(job, now_ns)
            if job.admitted_step is None:
                job.admitted_step = self.step
                job.num_computed_tokens = job.num_cached_tokens
                num_new_tokens = job.num_prompt_tokens - job.num_cached_tokens
                self.charge(job, num_prefill_tokens=num_new_tokens, num_cached_tokens=job.num_cached_tokens)
            self.running.append(job)
        assert len(self.running) <= self.num_slots
        assert sum(job.num_tokens for job in self.running) <= self.num_kv_tokens
        self.running.sort(key=lambda job: job.claim.key)
        self.compute()
        self.queue.check_integrity()
        self.step += 1

    def next_job(self, now_ns: int) -> Job | None:
        candidates = self.queue.candidates(now_ns, quantum=self.quantum)
        assert candidates[:1] == ([self.queue.head()] if len(self.queue) else [])
        return prefer_cached(candidates, lambda job: job.num_cached_tokens)

    def make_room(self, job: Job, now_ns: int) -> bool:
        num_missing = job.num_tokens - (self.num_kv_tokens - sum(other.num_tokens for other in self.running))
        if len(self.running) < self.num_slots and num_missing <= 0:
            return True
        level = job.claim.level
        victims = choose_victims(self.running, level, max(0, num_missing), lambda other: other.num_tokens)
        for victim in victims:
            assert victim.claim.level > level, "an equal or higher claim gave way"
            assert victim.admitted_step != self.step, "admitted and thrown out in one step"
            self.running.remove(victim)
            victim.num_computed_tokens = 0
            self.queue.add_preempted(victim, now_ns, by_claim=True)
            self.num_preemptions += 1
        return bool(victims)

    def compute(self) -> None:
        prompts = [job for job in self.running if job.num_remaining_tokens]
        for job in self.running:
            if not job.num_remaining_tokens:
                self.draw(job)
        remaining, levels = [job.num_remaining_tokens for job in prompts], [job.claim.level for job in prompts]
        shares = share_prefill(self.budget_tokens, remaining, levels, min_chunk=self.min_chunk, block_size=4)
        assert not prompts or any(shares)
        for job, share in zip(prompts, shares, strict=True):
            job.num_computed_tokens += share
            if not share:
                job.claim.pass_over(STEP_NS)
            elif not job.num_remaining_tokens:
                self.draw(job)

    def draw(self, job: Job) -> None:
        job.num_drawn_tokens += 1
        job.num_computed_tokens += 1
        self.charge(job, num_output_tokens=1)
        if job.num_drawn_tokens == job.num_output_tokens:
            job.ended_step = self.step
            self.running.remove(job)

    def charge(self, job: Job, **tokens: int) -> None:
        self.queue.charge(job.claim, **tokens)
        self.service[job.claim.account] += round(
            10 * sum(getattr(COSTS, name.removeprefix("num_").removesuffix("_tokens")) * n for name, n in tokens.items())
        )


@dataclass
class Scenario:
    """A tenant "a" that always has four requests of the highest class waiting, and others who want a little."""

    num_slots: int
    num_kv_tokens: int
    min_chunk: int
    extra_budget: int
    quantum: float
    light_weight: float
    flood: list[tuple[int, int]]  # prompt and output tokens, over and over
    light: list[tuple[int, int, int, int, int]]  # arrival step, level, prompt, output, cached tokens
    aging_steps: int

    def __post_init__(self) -> None:
        self.rules = make_rules(
            tenants=(("a", 1.0), ("b", self.light_weight)),
            ttft_target_ns=20 * STEP_NS,
            aging_ns=self.aging_steps * STEP_NS,
        )
        self.toy = Toy(
            self.rules,
            self.num_slots,
            self.num_kv_tokens,
            self.num_slots * self.min_chunk + self.extra_budget,
            self.min_chunk,
            self.quantum,
        )

    def bounds(self, level: int) -> tuple[int, int]:
        """Most steps from arrival to admission, and to the end, for a light request of that class's level.

        It is at level 0 after `level * aging` steps of waiting. There it is passed only by
        - those that were preempted or grew up while they ran: each light request at most once,
        - the flood, while its counter is not above the light account's: that one never exceeds the smallest by more than all
          light requests together cost, or the quantum; each admission of the flood adds at least its cheapest request,
        and each admission takes at most the steps that one sequence at level 0 needs: all of that level run at once and get at
        least `min_chunk` tokens of a prompt in each step, and lower claims give way.
        """
        sizes = self.flood + [(prompt, output) for _, _, prompt, output, _ in self.light]
        run_steps = max(-(-(prompt + output) // self.min_chunk) + output for prompt, output in sizes) + 1
        light_cost = sum(prompt + 2 * output for _, _, prompt, output, _ in self.light) / self.light_weight
        num_floods = int((light_cost + self.quantum) / min(prompt for prompt, _ in self.flood)) + 1
        num_admissions = 2 * len(self.light) + num_floods + 1
        admission = level * self.aging_steps + 1 + num_admissions * run_steps
        return admission, admission + (self.rules.max_num_claim_preemptions + 2) * run_steps

    def run(self, num_steps: int) -> list[Job]:
        """The light requests, after so many steps or when all have ended."""
        arrivals = deque(sorted(self.light))
        sizes = deque(self.flood)
        jobs: list[Job] = []
        flood: list[Job] = []
        for step in range(num_steps):
            while sum(job.admitted_step is None for job in flood) < 4:
                flood.append(self.toy.submit("a", 0, *sizes[0]))
                sizes.rotate(-1)
            while arrivals and arrivals[0][0] == step:
                _, level, prompt, output, cached = arrivals.popleft()
                jobs.append(self.toy.submit("b", level, prompt, output, min(cached, prompt - 1)))
            self.toy.run_step()
            flood = [job for job in flood if job.ended_step is None]
            if not arrivals and all(job.ended_step is not None for job in jobs):
                break
        return jobs


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    sizes = st.tuples(st.integers(4, 40), st.integers(1, 8))
    light = st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(1, 40), st.integers(1, 8), st.integers(0, 40))
    return Scenario(
        num_slots=draw(st.integers(1, 4)),
        num_kv_tokens=draw(st.integers(48, 160)),
        min_chunk=draw(st.sampled_from([4, 8])),
        extra_budget=draw(st.integers(0, 16)),
        quantum=draw(st.sampled_from([0.0, 60.0])),
        light_weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
        flood=draw(st.lists(sizes, min_size=1, max_size=4)),
        light=draw(st.lists(light, min_size=1, max_size=5)),
        aging_steps=draw(st.sampled_from([5, 20, 60])),
    )


@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_nobody_waits_beyond_the_bound(scenario: Scenario) -> None:
    num_steps = 61 + scenario.bounds(3)[1]
    for job in scenario.run(num_steps):
        to_admission, to_end = scenario.bounds(job.claim.class_level)
        assert job.admitted_step is not None
        assert job.admitted_step - job.arrival_step <= to_admission
        assert job.ended_step is not None
        assert job.ended_step - job.arrival_step <= to_end
        assert job.num_drawn_tokens == job.num_output_tokens
        assert job.claim.num_claim_preemptions <= scenario.rules.max_num_claim_preemptions


def scenario_of(light: list[tuple[int, int, int, int, int]], *, aging_steps: int, num_slots: int = 1) -> Scenario:
    return Scenario(num_slots, 100, 8, 0, 0.0, 1.0, [(16, 4)], light, aging_steps)


def test_without_ageing_a_low_class_would_starve() -> None:
    """What the bound rests on: the same traffic and ageing far away."""
    light = [(3, 2, 16, 4, 0)]
    with_ageing = scenario_of(light, aging_steps=20)
    num_steps = 5 * with_ageing.bounds(2)[1]
    assert with_ageing.run(num_steps)[0].ended_step is not None
    assert scenario_of(light, aging_steps=10**9).run(num_steps)[0].admitted_step is None


def test_a_running_prompt_that_gets_no_budget_grows_up() -> None:
    """Two long prompts of level 0 take the whole budget, one after the other, and a third comes; level 2 runs beside them."""
    toy = Toy(make_rules(aging_ns=10 * STEP_NS), num_slots=3, num_kv_tokens=1000, budget_tokens=8, min_chunk=8)
    low = toy.submit("b", 2, 16, 1)
    toy.submit("a", 0, 200, 1)
    second = toy.submit("a", 0, 200, 1)
    levels = []
    while low.ended_step is None:
        if toy.step == 40:
            third = toy.submit("a", 0, 200, 1)
        toy.run_step()
        levels.append(low.claim.level)
    assert low.admitted_step == 0
    assert levels == [2] * 9 + [1] * 10 + [0] * (len(levels) - 19)
    assert second.ended_step is not None  # due before it
    assert third.num_computed_tokens == 0  # due after it


def test_sch_11_a_light_tenant_next_to_a_heavy_one_starts_with_the_next_free_slots() -> None:
    toy = Toy(make_rules(), num_slots=2, num_kv_tokens=400, budget_tokens=32, min_chunk=8)
    for _ in range(200):
        toy.submit("a", 0, 32, 4)
    for _ in range(10):
        toy.run_step()
    light = toy.submit("b", 0, 32, 4)
    num_ended = toy.next_id - 1 - len(toy.queue) - len(toy.running)
    while light.admitted_step is None:
        toy.run_step()
    num_ended = toy.next_id - len(toy.queue) - len(toy.running) - num_ended
    assert num_ended <= 2  # completions before it started


@pytest.mark.parametrize("quantum", [0.0, 100.0])
def test_two_floods_share_by_weight_in_tokens(quantum: float) -> None:
    """Weights 1 and 3; the one with weight 1 sends requests four times as long, of which most is cached."""
    rules = make_rules(tenants=(("a", 1.0), ("b", 3.0)))
    toy = Toy(rules, num_slots=3, num_kv_tokens=1000, budget_tokens=32, min_chunk=8, quantum=quantum)
    for _ in range(400):
        toy.submit("a", 0, 40, 8, num_cached=30)
    for _ in range(400):
        toy.submit("b", 0, 10, 2)
    for _ in range(300):
        toy.run_step()
    assert {job.claim.account[0] for job in toy.queue} == {"a", "b"}
    shares = [toy.service["a", "c0"] / 1, toy.service["b", "c0"] / 3]
    assert jain_index(shares) > 0.995
    # Service is counted in tenths of a token. Three run at once, the dearest costs 10 + 3 + 16.
    assert abs(shares[0] - shares[1]) <= 10 * (quantum + 2 * 3 * 29)


def test_higher_claims_take_the_place_of_lower_ones_which_come_back_first() -> None:
    toy = Toy(make_rules(aging_ns=10**9), num_slots=2, num_kv_tokens=1000, budget_tokens=32, min_chunk=8)
    low = [toy.submit("b", 2, 8, 30) for _ in range(4)]
    for _ in range(5):
        toy.run_step()
    assert [job.admitted_step for job in low] == [0, 0, None, None]
    high = toy.submit("a", 0, 8, 3)
    toy.run_step()
    assert high.admitted_step == 5
    assert toy.num_preemptions == 1
    assert toy.running == [high, low[0]]  # the last in rank of those with as much to compute again gave way
    while high.ended_step is None:
        toy.run_step()
    toy.run_step()
    assert low[1] in toy.running
    assert low[2].admitted_step is None
    while low[3].ended_step is None:
        toy.run_step()
    assert all(job.num_drawn_tokens == 30 for job in low)
    assert toy.num_preemptions == 1
