"""From a plan to the shares of client processes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loadtest.feeding import MAX_AHEAD_BYTES, PlanReader, Share, max_ahead, neediest, split_clients
from headrace.loadtest.plan import LoadPlan, PlannedRequest, api_path, join_url
from headrace.loadtest.records import RunSettings


def planned(index: int, due: float | None = None, **more: object) -> PlannedRequest:
    return PlannedRequest(index=index, due=due, body={"model": "m"}, **more)  # type: ignore[arg-type]


def reader(requests: object, **settings: object) -> PlanReader:
    wanted = RunSettings(url="http://x", model="m", **settings)  # type: ignore[arg-type]
    return PlanReader(LoadPlan(settings=wanted, requests=requests, path="/v1/completions"))  # type: ignore[arg-type]


def indices(plan: PlanReader) -> list[list[int]]:
    read = iter(plan.next, None)
    return [[request.index, *(turn.index for turn in request.then)] for request in read]


def test_an_endless_plan_ends_by_number_and_by_duration() -> None:
    assert indices(reader((planned(index) for index in itertools.count()), num_requests=3)) == [[0], [1], [2]]
    due = (planned(index, index / 2) for index in itertools.count())
    assert indices(reader(due, arrival="constant", duration_seconds=1.5)) == [[0], [1], [2]]


def test_turns_count_and_the_last_conversation_is_cut_at_the_number() -> None:
    talks = [planned(0, then=(planned(1), planned(2))), planned(3, then=(planned(4), planned(5)))]
    plan = reader(talks, num_requests=5)
    assert indices(plan) == [[0, 1, 2], [3, 4]]
    assert plan.num_read == 5


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([planned(0)], "no due time"),
        ([planned(0, 1.0), planned(1, 0.5)], "before the one"),
        ([planned(0, float("nan"))], "due at nan"),
        ([PlannedRequest(index=0, due=0.0, body={})], "must not be empty"),
        ([PlannedRequest(index=0, due=0.0, body={"stream": True})], "nor hold stream"),
    ],
)
def test_a_request_that_cannot_be_sent_is_told_in_words(requests: list[PlannedRequest], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        indices(reader(requests, arrival="poisson"))


def test_a_closed_loop_does_not_look_at_due_times() -> None:
    request = reader([planned(0, 5.0)]).next()
    assert request is not None
    assert request.due is None


@given(st.integers(1, 200), st.integers(1, 16))
def test_clients_are_split_evenly(num_clients: int, num_processes: int) -> None:
    split = split_clients(num_clients, num_processes)
    assert sum(split) == num_clients
    assert max(split) - min(split) <= 1


def test_feeding_goes_to_the_process_with_the_least_and_stops_when_all_are_full() -> None:
    shares = [Share(max_ahead(2)), Share(max_ahead(1))]
    order = []
    request = reader([planned(0)]).next()
    assert request is not None
    while (place := neediest(shares)) is not None:
        shares[place].give(request)
        order.append(place)
    assert order == [0, 1, 0]
    shares[1].take(1, request.num_bytes)
    assert neediest(shares) == 1


def test_one_conversation_beyond_the_bound_of_bytes_still_goes_but_alone() -> None:
    share = Share(100)
    big = reader([PlannedRequest(index=0, body={"prompt": "x" * (MAX_AHEAD_BYTES + 1)})]).next()
    assert big is not None
    assert share.has_room
    share.give(big)
    assert not share.has_room


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_server_may_be_named_with_or_without_v1(base: str) -> None:
    assert join_url(base, api_path("chat")) == "http://h:1/v1/chat/completions"


def test_a_prefix_stays_and_a_key_is_never_shown() -> None:
    assert join_url("http://h/serve/v1", "/v1/models") == "http://h/serve/v1/models"
    assert join_url("http://h/v1", "/metrics") == "http://h/v1/metrics"
    settings = RunSettings(url="http://h", model="m")
    plan = LoadPlan(settings=settings, requests=[], path="/v1/completions", headers={"Authorization": "Bearer secret"})
    assert "secret" not in f"{plan!r} {plan}"
    with pytest.raises(ValueError, match="chat, completions"):
        api_path("chats")
