"""Client processes: limits, faults, interruption, and the bottleneck warning in earnest."""

import pathlib
import pickle
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from headrace.loadtest.engine import LoadError, run_load
from headrace.loadtest.plan import LoadPlan, PlannedRequest
from headrace.loadtest.progress import LoadProgress, Phase
from headrace.loadtest.records import Outcome, Run, RunSettings

from .conftest import Truth, stream

pytestmark = pytest.mark.slow
ODD_CLIENT = pathlib.Path(__file__).parent / "odd_client.py"
INTERRUPTED_RUN = pathlib.Path(__file__).parent / "interrupted_run.py"
SHORT = stream(3, 10.0, first_ms=20.0)
ENDLESS = stream(400, 50.0)


def outcomes(run: Run) -> Counter[str]:
    return Counter(record.error_kind or record.outcome.value for record in run.requests)


def test_connections_are_kept_and_opened_before_the_clock_starts(truth: Truth) -> None:
    run = run_load(truth.plan([SHORT] * 12, settings={"num_clients": 3}))
    assert outcomes(run) == {"completed": 12}
    assert all(record.connect_seconds is None for record in run.requests)
    log = truth.log()
    assert len({log[str(place)]["connection"] for place in range(12)}) == 3
    assert run.server == {"header": "truth"}
    assert run.environment.keys() >= {"python", "platform", "headrace", "event_loop", "aiohttp"}
    assert run.warnings == []


def test_new_connections_are_measured_apart_from_ttft(truth: Truth) -> None:
    run = run_load(truth.plan([SHORT] * 4, opens_new_connections=True))
    assert all(record.connect_seconds is not None and 0 < record.connect_seconds < 1 for record in run.requests)
    assert all(record.sent >= record.scheduled + (record.connect_seconds or 0) for record in run.requests)
    log = truth.log()
    assert len({log[str(place)]["connection"] for place in range(4)}) == 4
    assert run.settings.extra == {"new_connections": "true"}


def test_the_stamp_is_taken_by_the_protocol_not_at_reading_time() -> None:
    """The one place where the client leans on an inner part of aiohttp."""
    import asyncio

    from headrace.loadtest import http_client

    async def factory() -> Any:
        async with http_client.HttpClient("http://x", {}, timeout_seconds=1, opens_new_connections=False) as client:
            return client._session.connector._factory()  # type: ignore[union-attr]

    assert isinstance(asyncio.run(factory()), http_client._StampingHandler)


def test_headers_of_one_request_are_its_own_and_go_over_those_of_all(truth: Truth) -> None:
    plan = truth.plan([SHORT, SHORT], headers={"X-Which": "all", "X-Other": "o"})
    first, second = plan.requests
    plan.requests = [msgspec.structs.replace(first, headers={"x-which": "mine"}), second]
    run = run_load(plan)
    assert [record.outcome for record in run.requests] == [Outcome.COMPLETED] * 2
    sent = [truth.log()[str(place)]["headers"] for place in (0, 1)]
    assert [(headers["x-which"], headers["x-other"]) for headers in sent] == [("mine", "o"), ("all", "o")]


def test_headers_are_sent_and_never_saved_and_the_body_is_as_planned(truth: Truth) -> None:
    plan = truth.plan([SHORT], headers={"Authorization": "Bearer s3cret"})
    run = run_load(plan)
    sent = truth.log()["0"]
    assert sent["headers"]["authorization"] == "bearer s3cret"  # the log holds lower case
    assert sent["headers"]["accept-encoding"] == "identity"
    assert sent["body"] == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    assert b"s3cret" not in msgspec.json.encode(run)


def test_a_server_that_refuses_usage_is_asked_without_and_the_run_says_so(truth: Truth) -> None:
    run = run_load(truth.plan([{**SHORT, "refuses_usage": True}] * 3))
    assert outcomes(run) == {"completed": 3}
    assert [record.status for record in run.requests] == [200] * 3
    assert [record.output_tokens for record in run.requests] == [None] * 3
    assert any("include_usage" in warning for warning in run.warnings)
    assert truth.log()["0"]["asked_usage"] is False


def test_faults_of_the_network_have_their_kinds(truth: Truth) -> None:
    scripts = [
        {**SHORT, "content_type": "application/json"},
        {"steps": [[0, "cut"]]},
        {"steps": [[5, "text", "a"], [0, "finish", "stop"], [0, "done"], [0, "cut"]]},  # after the end mark: harmless
        {"steps": [[5, "text", "a"], [0, "raw", "data: {broken\n\n"]]},
        {"steps": [[5, "text", "a"], [5000, "text", "b"]]},
        {"steps": [[5, "text", "a"], [0, "finish", "stop"], [0, "done"], [9000, "comment"]]},  # the body's end never comes
    ]
    run = run_load(truth.plan(scripts, settings={"timeout_seconds": 1.5}))
    kinds = [record.error_kind or record.outcome.value for record in run.requests]
    assert kinds == ["not_a_stream", "cut", "completed", "bad_json", "timeout", "completed"]
    assert all(record.ended is not None and record.ended - record.sent < 1.8 for record in run.requests)
    assert run.wall_seconds < 6


def test_no_server_is_an_error_in_words() -> None:
    settings = RunSettings(url="http://127.0.0.1:9", model="m", num_clients=2, num_requests=2)
    plan = LoadPlan(settings=settings, requests=[PlannedRequest(index=0, body={"model": "m"})], path="/v1/completions")
    with pytest.raises(LoadError, match=r"no connection to http://127\.0\.0\.1:9"):
        run_load(plan)


def test_a_duration_ends_a_closed_loop_and_lets_requests_finish(truth: Truth) -> None:
    seen: list[LoadProgress] = []
    script = stream(4, 50.0)
    settings = {"num_clients": 4, "duration_seconds": 1.0, "warm_up_seconds": 0.3, "cool_down_seconds": 0.2, "num_processes": 2}
    run = run_load(truth.plan([script] * 1000, settings=settings), on_progress=seen.append)
    assert outcomes(run).keys() == {"completed"}
    assert 8 <= len(run.requests) <= 24
    assert (run.window_begin, run.window_end) == (0.3, 0.8)
    assert max(record.scheduled for record in run.requests) < 1.0 < max(record.ended or 0 for record in run.requests)
    assert seen[0].phase is Phase.CONNECTING
    assert {Phase.WARM_UP, Phase.MEASURING} <= {progress.phase for progress in seen}
    assert seen[-1].num_completed == len(run.requests)
    assert seen[-1].output_tokens == 4 * len(run.requests)


def test_what_still_runs_after_the_drain_is_unfinished_and_kept_with_what_came(truth: Truth) -> None:
    plan = truth.plan([ENDLESS] * 4, settings={"num_clients": 2, "duration_seconds": 0.5})
    run = run_load(plan, drain_seconds=0.3)
    assert outcomes(run) == {"unfinished": 2}
    assert all(record.counted_chunks > 5 and record.ended is None for record in run.requests)
    assert "given up" in run.warnings[0]
    assert not run.was_interrupted


def test_beyond_max_outstanding_requests_wait_loudly_and_all_are_accounted_for(truth: Truth) -> None:
    dues = [place * 0.001 for place in range(400)]
    plan = truth.plan([ENDLESS] * 400, dues=dues, settings={"duration_seconds": 0.7}, max_outstanding=3)
    run = run_load(plan, drain_seconds=0.2)
    assert outcomes(run) == {"unfinished": 3, "not_sent": 397}
    assert sorted(record.index for record in run.requests) == list(range(400))
    plan = truth.plan([stream(2, 60.0)] * 9, dues=dues[:9], max_outstanding=3)
    run = run_load(plan)
    assert outcomes(run) == {"completed": 9}
    assert any("max_outstanding" in warning for warning in run.warnings)
    assert max(record.sent - record.scheduled for record in run.requests) > 0.1
    assert run.client.send_lag_p99_seconds < 0.1  # the bound's doing is not the client's
    assert run.settings.extra == {"max_outstanding": "3"}


def test_conversations_keep_their_order_and_think(truth: Truth) -> None:
    def turn(
        index: int, *, think: float = 0.0, then: tuple[PlannedRequest, ...] = (), due: float | None = None
    ) -> PlannedRequest:
        body = {"model": "m", "truth": {"id": str(index), **SHORT}}
        return PlannedRequest(index=index, body=body, think_seconds=think, then=then, due=due)

    for arrival, num_clients in (("closed", 2), ("trace", None)):
        dues = [None, None] if num_clients else [0.0, 0.1]
        talks = [turn(0, then=(turn(1, think=0.2), turn(2)), due=dues[0]), turn(3, then=(turn(4),), due=dues[1])]
        settings = RunSettings(url=truth.url, model="m", arrival=arrival, num_clients=num_clients)
        run = run_load(LoadPlan(settings=settings, requests=talks, path="/v1/completions"))
        assert outcomes(run) == {"completed": 5}
        first, second, third, other, last = run.requests
        assert first.ended is not None
        assert second.ended is not None
        assert second.scheduled - first.ended == pytest.approx(0.2, abs=0.05)
        assert third.scheduled >= second.ended
        assert first.process == second.process == third.process
        assert other.process == last.process != first.process


def test_a_closed_loop_does_not_spin_against_a_server_that_refuses(truth: Truth) -> None:
    hasty = {"status": 503, "steps": []}
    run = run_load(truth.plan([hasty] * 5000, settings={"num_clients": 2, "duration_seconds": 1.0}))
    assert outcomes(run).keys() == {"http_503"}
    assert 4 <= len(run.requests) <= 20
    run = run_load(truth.plan([{**hasty, "retry_after": 60}, SHORT], settings={"num_clients": 1, "duration_seconds": 1.0}))
    assert outcomes(run) == {"http_503": 1}  # it waits as told, within a bound
    assert run.wall_seconds < 1.0


def test_ctrl_c_ends_the_run_with_what_there_is(truth: Truth, tmp_path: pathlib.Path) -> None:
    plan_file, result_file = tmp_path / "plan", tmp_path / "result"
    scripts = [SHORT, SHORT, *[ENDLESS] * 50]
    plan_file.write_bytes(pickle.dumps(truth.plan(scripts, settings={"num_clients": 4, "num_processes": 2})))
    subprocess.run([sys.executable, str(INTERRUPTED_RUN), str(plan_file), str(result_file)], check=True, timeout=60)
    run, is_handler_restored = pickle.loads(result_file.read_bytes())
    assert run.was_interrupted
    assert outcomes(run) == {"completed": 2, "unfinished": 4}
    assert "ended by its user" in run.warnings[0]
    assert is_handler_restored
    assert run.window_end == run.wall_seconds


def test_a_client_process_that_dies_is_an_error_and_no_hang(truth: Truth) -> None:
    plan = truth.plan([ENDLESS] * 4, settings={"num_clients": 4, "num_processes": 2})
    began = time.monotonic()
    with pytest.raises(LoadError, match=r"client process \d ended early \(exit code 7\).*out of luck"):
        run_load(plan, client_command=[sys.executable, str(ODD_CLIENT), "dies"])
    assert time.monotonic() - began < 15


def test_a_plan_that_breaks_ends_the_run_and_its_processes(truth: Truth) -> None:
    def requests() -> Any:
        yield from truth.plan([SHORT] * 5).requests
        raise RuntimeError("the file is broken")

    plan = truth.plan([])
    plan.requests = requests()
    with pytest.raises(RuntimeError, match="the file is broken"):
        run_load(plan)


def test_a_client_that_is_kept_from_its_work_says_so(truth: Truth) -> None:
    """Each process burns 60 ms of every 100: sends and wake-ups are late, and the figures would be the client's."""
    dues = [place * 0.02 for place in range(60)]
    plan = truth.plan([stream(5, 20.0)] * 60, dues=dues, settings={"num_processes": 1})
    run = run_load(plan, client_command=[sys.executable, str(ODD_CLIENT), "burns"])
    assert run.client.was_bottleneck
    assert "late" in run.client.why
    assert run.client.send_lag_p99_seconds > 0.02
    assert run.client.cpu_cores_used > 0.1


def test_a_client_at_ease_does_not_warn(truth: Truth) -> None:
    """Other work on this machine may hold the client up, truly: the warning must be silent at least once in a few runs."""
    for _ in range(4):
        run = run_load(truth.plan([stream(20, 25.0)] * 8, settings={"num_clients": 4, "num_processes": 2}))
        if not run.client.was_bottleneck:
            break
    assert run.client.why == ""
    assert 0 < run.client.max_process_cpu_share < 0.85
