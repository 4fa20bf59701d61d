"""A tenant that seldom asks beside one that never stops: places and memory are kept for it, and its prompts go first."""

import pytest

from headrace.protocol.lifecycle import RequestState
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.traffic import DEFAULT_TENANT, OTHER_TENANT, ServiceClass, Tenant, TrafficPolicy
from headrace.scheduling.recent_shares import EXPECTED_NS
from tests.core.driver import Driver, alone, make_request, make_spec, rows_of

MS = 1_000_000
NUM_PLACES = 32  # of which a sixteenth can be kept


def traffic(*tenants: str) -> TrafficPolicy:
    classes = (
        ServiceClass(name="high", level=0, ttft_target_ms=100, tbt_target_ms=0),
        ServiceClass(name="low", level=1, ttft_target_ms=600_000, tbt_target_ms=0),
    )
    names = (DEFAULT_TENANT, OTHER_TENANT, "heavy", "light", *tenants)
    return TrafficPolicy(classes=classes, default_class="high", tenants=tuple(Tenant(name=name) for name in names))


def busy_driver(num_blocks: int = 2000, num_places: int = NUM_PLACES, **config: object) -> Driver:
    return Driver(
        make_spec(num_blocks=num_blocks),
        max_num_seqs=num_places,
        max_num_batched_tokens=1024,
        traffic=traffic(),
        enable_prefix_caching=False,
        **config,  # type: ignore[arg-type]
    )


def ask(
    driver: Driver, number: int, tenant: str, num_tokens: int = 4, max_tokens: int = 100, service_class: str = "high"
) -> GenerationRequest:
    prompt = [2 + number % 50, *[3 + index % 50 for index in range(num_tokens - 1)]]
    asked = make_request(
        number,
        prompt,
        max_tokens=max_tokens,
        arrival_ns=driver.clock.now_ns(),
        tenant_id=tenant,
        service_class=service_class,
    )
    driver.add(asked)
    return asked


def crowd(driver: Driver, tenant: str = "heavy", num: int = 200, **fields: object) -> None:
    for number in range(1000, 1000 + num):
        ask(driver, number, tenant, **fields)  # type: ignore[arg-type]


def steps_to_start(driver: Driver, number: int) -> int:
    """Steps until it has a row."""
    for count in range(1, 1000):
        if number in {row.request_id for row in driver.step().rows}:
            return count
    raise AssertionError("it never starts")


def num_running(driver: Driver) -> int:
    return driver.scheduler.statistics().num_running


def had_a_little(driver: Driver) -> None:
    """Both tenants have asked: the light one a little."""
    ask(driver, 1, "light", max_tokens=1)
    ask(driver, 2, "heavy", max_tokens=50)
    driver.run()


def test_one_that_has_asked_before_finds_a_place_at_once() -> None:
    driver = busy_driver()
    had_a_little(driver)
    crowd(driver)
    for _ in range(20):
        driver.step()
    assert num_running(driver) == NUM_PLACES - 2
    ask(driver, 3, "light")
    ask(driver, 4, "light")
    assert rows_of(driver.step())[-2:] == [(3, 4), (4, 4)]
    assert num_running(driver) == NUM_PLACES
    ask(driver, 5, "light")
    driver.step()
    assert driver.outcomes[5].event_steps == []
    driver.run()
    for number in (3, 4, 5, 1000):
        assert driver.outcomes[number].token_ids == alone(driver.requests[number]).token_ids


@pytest.mark.parametrize("policy", ["headrace", "fcfs"])
def test_a_tenant_alone_and_first_come_first_served_use_all_places(policy: str) -> None:
    driver = busy_driver(policy=policy)
    if policy == "fcfs":
        had_a_little(driver)
    crowd(driver)
    driver.step()
    assert num_running(driver) == NUM_PLACES


def test_places_are_not_kept_for_those_that_do_not_come_again() -> None:
    driver = busy_driver()
    had_a_little(driver)
    crowd(driver, num=300)
    driver.step()
    assert num_running(driver) == NUM_PLACES - 2
    driver.clock.advance(EXPECTED_NS / 1e9)
    driver.step()
    assert num_running(driver) == NUM_PLACES


@pytest.mark.parametrize(("num_places", "num_kept"), [(4, 0), (7, 0), (8, 1), (31, 1), (32, 2), (128, 2)])
def test_so_many_places_are_kept(num_places: int, num_kept: int) -> None:
    driver = busy_driver(num_places=num_places)
    had_a_little(driver)
    crowd(driver, num=300)
    driver.step()
    assert num_running(driver) == num_places - num_kept


def test_many_light_tenants_do_not_empty_the_batch() -> None:
    names = tuple(f"t{number}" for number in range(40))
    driver = Driver(make_spec(num_blocks=2000), max_num_seqs=64, max_num_batched_tokens=1024, traffic=traffic(*names))
    for number, name in enumerate(names):
        ask(driver, number, name, max_tokens=1)
    ask(driver, 100, "heavy", max_tokens=50)
    driver.run()
    crowd(driver)
    driver.step()
    assert num_running(driver) == 64 - 64 // 16


def test_a_place_kept_at_one_level_is_no_place_kept_from_a_higher_one() -> None:
    """The light tenant asks in the low class: it is preempted by high claims anyway, and they use all places."""
    driver = busy_driver()
    ask(driver, 1, "light", max_tokens=1, service_class="low")
    ask(driver, 2, "heavy", max_tokens=50, service_class="low")
    driver.run()
    crowd(driver)
    driver.step()
    assert num_running(driver) == NUM_PLACES


def test_lower_claims_give_way_and_nothing_is_kept_in_vain() -> None:
    """High claims of the heavy tenant take the places of low ones, all of them, although a light one may come."""
    driver = busy_driver()
    had_a_little(driver)
    for number in range(500, 500 + NUM_PLACES):
        ask(driver, number, "heavy", service_class="low")
    driver.step()
    assert num_running(driver) == NUM_PLACES
    crowd(driver, num=NUM_PLACES - 2)
    driver.step()
    running = [number for number, sequence in driver.scheduler._live.by_id.items() if sequence.state is RequestState.RUNNING]
    assert sum(number >= 1000 for number in running) == NUM_PLACES - 2
    ask(driver, 3, "light")
    assert steps_to_start(driver, 3) == 1


def test_memory_is_kept_with_the_places() -> None:
    """Prompts of 40 tokens are 10 blocks: the heavy tenant leaves 12 of 200 free, beside a block for each that runs."""
    driver = busy_driver(num_blocks=200)
    for number in range(100):  # the usual prompt is learned
        ask(driver, number, "light" if number % 10 == 0 else "heavy", num_tokens=40, max_tokens=1)
        driver.run()
    crowd(driver, num_tokens=40, max_tokens=4)
    driver.step()
    assert num_running(driver) == 17  # 170 blocks, 17 to grow, 13 left; alone it would have 18
    ask(driver, 900, "light", num_tokens=40, max_tokens=4)
    assert steps_to_start(driver, 900) == 1
    driver.run()


def test_nobody_is_preempted_for_a_place_while_one_is_free() -> None:
    driver = busy_driver()
    had_a_little(driver)
    for number in range(500, 520):
        ask(driver, number, "heavy", service_class="low")
    driver.step()
    crowd(driver, num=NUM_PLACES - 20)
    driver.step()
    assert num_running(driver) == NUM_PLACES
    assert driver.scheduler.statistics().num_preemptions == 0


def test_who_was_preempted_comes_back_to_a_place_that_is_kept_from_newcomers() -> None:
    driver = busy_driver()
    ask(driver, 1, "light", max_tokens=1, service_class="low")
    ask(driver, 2, "heavy", max_tokens=50, service_class="low")
    driver.run()
    for number in range(500, 500 + NUM_PLACES):
        ask(driver, number, "heavy", service_class="low")
    driver.step()
    assert num_running(driver) == NUM_PLACES - 2
    for number in range(1000, 1005):
        ask(driver, number, "heavy", max_tokens=3 if number < 1002 else 50)
    driver.step()
    assert driver.scheduler.statistics().num_claim_preemptions == 3
    while driver.outcomes[1001].finish_reason is None:
        driver.step()
    driver.step()
    assert num_running(driver) == NUM_PLACES
    states = [sequence.state for sequence in driver.scheduler._live.by_id.values()]
    assert states.count(RequestState.PREEMPTED) == 1
    assert states.count(RequestState.WAITING) == 2  # newcomers, for which nothing is left


def test_who_was_preempted_comes_back_to_memory_that_is_kept_from_newcomers() -> None:
    driver = busy_driver(num_blocks=200)
    for number in range(100):
        ask(driver, number, "light" if number % 10 == 0 else "heavy", num_tokens=40, max_tokens=1)
        driver.run()
    crowd(driver, num=17, num_tokens=40, max_tokens=30)
    while not driver.scheduler.statistics().num_preemptions:
        driver.step()
    ask(driver, 900, "light", num_tokens=4, max_tokens=2)
    num_waits = 0
    while not driver.outcomes[900].event_steps:  # a light one does not pass the preempted ones
        driver.step()
        states = [
            driver.scheduler._live.by_id[number].state for number in range(1000, 1017) if number in driver.scheduler._live.by_id
        ]
        num_waits += (is_waiting := RequestState.PREEMPTED in states)
        assert not (is_waiting and driver.outcomes[900].event_steps)
    assert num_waits > 5
    driver.run()


def test_a_light_newcomer_joins_although_prompts_of_others_use_up_the_budget() -> None:
    driver = Driver(
        make_spec(num_blocks=2000), max_num_seqs=32, max_num_batched_tokens=40, min_chunk_tokens=20, traffic=traffic()
    )
    had_a_little(driver)
    for number in range(10, 14):
        ask(driver, number, "heavy", num_tokens=200, max_tokens=1)
    driver.step()
    assert num_running(driver) == 2
    ask(driver, 20, "light", num_tokens=30, max_tokens=1)
    assert dict(rows_of(driver.step())) == {20: 30}
    driver.run()


def test_a_cached_prefix_is_no_way_to_a_kept_place() -> None:
    """The light one is the head; the heavy tenant's next would be preferred to it for its prefix."""
    driver = Driver(make_spec(num_blocks=2000), max_num_seqs=8, max_num_batched_tokens=1024, traffic=traffic("a light one"))
    ask(driver, 1, "a light one", max_tokens=1)  # of two with equal counters it is the first by name
    ask(driver, 2, "heavy", max_tokens=50)
    driver.run()
    shared = list(range(2, 42))
    for number in range(10, 40):
        driver.add(make_request(number, shared, max_tokens=100, service_class="high", tenant_id="heavy"))
    driver.step()
    driver.step()
    assert num_running(driver) == 7
    ask(driver, 50, "a light one")
    assert steps_to_start(driver, 50) == 1
    driver.run()


def test_a_light_newcomer_passes_a_head_that_finds_no_memory() -> None:
    driver = busy_driver(num_blocks=60)
    had_a_little(driver)
    ask(driver, 10, "heavy", num_tokens=100, max_tokens=20)
    driver.step()
    ask(driver, 11, "heavy", num_tokens=200, max_tokens=2)  # 50 blocks
    driver.step()
    assert driver.outcomes[11].event_steps == []
    ask(driver, 12, "light", num_tokens=4, max_tokens=2)
    ask(driver, 13, "heavy", num_tokens=4, max_tokens=2)
    assert 12 in {row.request_id for row in driver.step().rows}
    assert 13 not in {row.request_id for row in driver.plans[-1].rows}
    driver.run()


def test_prompts_of_a_light_tenant_get_the_budget_first() -> None:
    driver = Driver(make_spec(num_blocks=2000), max_num_seqs=32, max_num_batched_tokens=40, traffic=traffic())
    had_a_little(driver)
    for number in range(10, 14):
        ask(driver, number, "heavy", num_tokens=200, max_tokens=1)
    driver.step()
    ask(driver, 20, "light", num_tokens=70, max_tokens=1)
    assert dict(rows_of(driver.step()))[20] == 40
    assert dict(rows_of(driver.step()))[20] == 30
    driver.run()


def test_a_crowd_of_a_tenant_that_returns_gets_its_share_and_no_more() -> None:
    """Idle time is no credit: from its return on both have equal amounts, however little one had before."""
    driver = busy_driver()
    had_a_little(driver)
    for number in range(1000, 1400):
        ask(driver, number, "heavy", max_tokens=40 + number * 7 % 40)
    for _ in range(200):
        driver.step()
    num_before = sum(len(driver.outcomes[number].token_ids) for number in range(1000, 1400))
    for number in range(100, 300):
        ask(driver, number, "light", max_tokens=40 + number * 7 % 40)
    for _ in range(300):
        driver.step()
    num_heavy = sum(len(driver.outcomes[number].token_ids) for number in range(1000, 1400)) - num_before
    num_light = sum(len(driver.outcomes[number].token_ids) for number in range(100, 300))
    assert num_heavy + num_light > 0.9 * 300 * NUM_PLACES
    # Light is behind when its crowd comes, since the places were taken; nor does it ever overtake by more than a batch.
    assert 0.4 <= num_light / (num_heavy + num_light) <= 0.56
    driver.run()


def test_the_heavy_tenant_goes_on_beside_a_light_one_that_always_has_somebody_waiting() -> None:
    driver = busy_driver(num_places=8)
    had_a_little(driver)
    crowd(driver, num=60, max_tokens=10)
    next_light = 100
    num_steps = 0
    while any(driver.outcomes[number].finish_reason is None for number in range(1000, 1060)):
        if driver.scheduler.statistics().num_waiting < 70 and next_light < 900:
            ask(driver, next_light, "light", max_tokens=10)
            next_light += 1
        driver.step()
        num_steps += 1
    assert num_steps < 60 * 10 / 8 * 2 * 1.5  # half of the machine for each, and a half more for the ends
    driver.run()
