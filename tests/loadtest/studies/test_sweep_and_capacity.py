"""sweep and capacity on a server whose knee and capacity are known."""

import msgspec
import pytest

from headrace.loadtest.figures import GoodputTarget, summarize
from headrace.loadtest.records import Run, RunSettings
from headrace.loadtest.report.model import VerdictKind
from headrace.loadtest.studies.alternation import Arm
from headrace.loadtest.studies.capacity import bracket_for, bracket_sentence, run_capacity
from headrace.loadtest.studies.errors import ENDED_BY, StudyError
from headrace.loadtest.studies.paired import run_compare
from headrace.loadtest.studies.single import run_single
from headrace.loadtest.studies.sweep import Point, run_sweep, settings_at, stop_reason
from tests.loadtest.studies.synthetic import PaperServer

CLOSED = RunSettings(url="http://h", model="m", num_clients=1, num_requests=12, output_tokens=20, prompt_tokens=32, seed=1)
OPEN = msgspec.structs.replace(CLOSED, arrival="poisson", num_clients=None, num_requests=None, rate=5.0, duration_seconds=60.0)
LENIENT = GoodputTarget(name="lenient", ttft_seconds=1.0, tbt_seconds=0.1)


def texts(report, kind: VerdictKind | None = None) -> str:
    return "\n".join(item.text for section in report.sections for item in section.verdicts if kind in (None, item.kind))


def test_the_knee_of_a_sweep_by_clients_is_found():
    """One client makes at most 50 tokens/s, all together 400: the knee is at 8 clients."""
    report = run_sweep(CLOSED, [1, 2, 4, 6, 8, 10, 12, 16, 24], PaperServer(prefill_seconds=0.0001), is_stopped_early=False)
    assert report.kind == "sweep"
    assert report.figures["knee_load"] == pytest.approx(8, rel=0.15)
    assert report.figures["load_unit"] == "clients"
    section = report.sections[0]
    assert section.curves[0].marks[0].x == report.figures["knee_load"]
    assert [len(line) for line in section.curves[0].series.values()] == [9]
    assert [result.label for result in section.results][:2] == ["1 client", "2 clients"]


def test_a_sweep_that_never_saturates_has_no_knee_and_says_so():
    report = run_sweep(CLOSED, [1, 2, 3, 4, 5], PaperServer(max_tokens_per_second=1e9))
    assert report.figures["knee_load"] is None
    assert "No knee" in texts(report)
    assert not report.sections[0].curves[0].marks


def test_a_sweep_stops_when_it_is_clearly_past_saturation_and_says_so():
    server = PaperServer(prefill_seconds=0.01)
    report = run_sweep(CLOSED, [1, 2, 4, 8, 16, 32, 64, 128], server)
    tried = [settings.num_clients for settings, _ in server.calls]
    assert tried == [1, 2, 4, 8, 16, 32]
    assert "past saturation" in texts(report)
    assert "were not tried" in texts(report)


def test_a_sweep_to_its_end_does_not_claim_to_have_stopped():
    report = run_sweep(CLOSED, [1, 2, 4, 8], PaperServer())
    assert "not tried" not in texts(report)


def test_each_point_has_requests_enough_for_its_clients_and_its_own_seed():
    server = PaperServer()
    run_sweep(CLOSED, [4, 1, 16], server, is_stopped_early=False)
    assert [(settings.num_clients, settings.num_requests, settings.seed) for settings, _ in server.calls] == [
        (1, 12, 1),
        (4, 16, 2),
        (16, 64, 3),
    ]


def test_a_sweep_by_rate_is_open_loop_and_stops_when_the_server_is_behind():
    server = PaperServer(requests_per_second=10)
    settings = msgspec.structs.replace(OPEN, duration_seconds=40.0)
    report = run_sweep(settings, [2, 4, 8, 16, 32, 64, 128], server, is_rate=True)
    assert all(used.arrival == "poisson" and used.num_clients is None for used, _ in server.calls)
    assert [used.rate for used, _ in server.calls] == [2, 4, 8, 16, 32]
    assert "completes" in texts(report)
    assert "Over-saturated" in texts(report, VerdictKind.WARNING)
    assert "2 requests/s: Not over-saturated" in texts(report, VerdictKind.OK)


def test_a_sweep_stops_when_most_requests_are_lost():
    server = PaperServer(requests_per_second=2, max_queued=2)
    run_sweep(OPEN, [8, 16, 32], server, is_rate=True)
    assert len(server.calls) == 1


def test_an_interrupted_sweep_keeps_its_points():
    server = PaperServer()

    def measure(settings: RunSettings, label: str) -> Run:
        if len(server.calls) == 2:
            raise KeyboardInterrupt
        return server(settings, label)

    report = run_sweep(CLOSED, [1, 2, 4], measure)
    assert len(report.sections[0].results) == 2
    assert "Interrupted: 2 of 3 loads" in texts(report)
    server.calls.clear()
    server.calls.extend([(CLOSED, "")] * 2)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(CLOSED, [1, 2, 4], measure)


def failing(server: PaperServer, after: int):
    """The server dies in the middle of a study."""

    def measure(settings: RunSettings, label: str) -> Run:
        if len(server.calls) >= after:
            raise StudyError("no connection to http://h: refused")
        return server(settings, label)

    return measure


def test_a_server_that_dies_leaves_the_points_before():
    report = run_sweep(CLOSED, [1, 2, 4], failing(PaperServer(), 2))
    assert len(report.sections[0].results) == 2
    assert report.figures[ENDED_BY] == "error"
    assert "Ended by an error (no connection to http://h: refused): 2 of 3 loads" in texts(report, VerdictKind.PROBLEM)
    with pytest.raises(StudyError):
        run_sweep(CLOSED, [1, 2, 4], failing(PaperServer(), 0))


def test_a_server_that_dies_leaves_the_bracket_so_far():
    report = run_capacity(OPEN, failing(PaperServer(requests_per_second=100), 2), target=LENIENT, start_rate=2.0)
    assert report.figures["capacity_low_per_second"] == 4.0
    assert report.figures[ENDED_BY] == "error"
    assert "Ended by an error" in texts(report, VerdictKind.WARNING)


def test_a_server_that_dies_leaves_whole_rounds():
    server = PaperServer()
    arms = [Arm(name, CLOSED, failing(server, 7)) for name in "ab"]
    report = run_compare(arms, 8)
    assert report.figures["num_rounds"] == 2
    assert report.figures[ENDED_BY] == "error"
    assert "2 of 8 rounds were measured" in texts(report, VerdictKind.PROBLEM)


def test_no_loads_are_no_sweep():
    with pytest.raises(ValueError, match="loads"):
        run_sweep(CLOSED, [], PaperServer())


def test_flat_throughput_has_to_last_two_points():
    server = PaperServer()

    def point(clients: int, tokens_per_second: float) -> Point:
        run = server(settings_at(CLOSED, clients, is_rate=False, requests_per_client=4), str(clients))
        return Point(clients, run, msgspec.structs.replace(summarize(run), output_tokens_per_second=tokens_per_second))

    rising = [point(1, 100), point(2, 190), point(4, 380)]
    assert stop_reason(rising, is_rate=False) == ""
    assert stop_reason([*rising, point(8, 385)], is_rate=False) == ""
    assert stop_reason([*rising, point(8, 385), point(16, 500)], is_rate=False) == ""
    assert "has not risen" in stop_reason([*rising, point(8, 385), point(16, 380)], is_rate=False)
    assert stop_reason([], is_rate=False) == ""


def test_capacity_brackets_the_rate_that_the_server_can_serve():
    """Ten starts a second; with Poisson arrivals waits stay under a second up to about 8 a second, and grow from 10 on."""
    server = PaperServer(requests_per_second=10)
    report = run_capacity(OPEN, server, target=LENIENT, min_goodput=0.9, start_rate=2.0, max_runs=20)
    low, high = report.figures["capacity_low_per_second"], report.figures["capacity_high_per_second"]
    assert 5 < low < high < 12
    assert high / low <= 1.1 + 1e-9
    assert "Capacity for goodput of at least 0.9 at lenient: at least" in texts(report, VerdictKind.OK)
    assert "at least 0.99 (off the same runs)" in texts(report)
    assert all(settings.arrival == "poisson" for settings, _ in server.calls)
    assert len({settings.seed for settings, _ in server.calls}) == len(server.calls)


def test_capacity_starts_from_a_closed_loop_without_a_rate():
    server = PaperServer(requests_per_second=10)
    report = run_capacity(OPEN, server, target=LENIENT, min_goodput=0.9, max_runs=20)
    first = server.calls[0][0]
    assert (first.arrival, first.num_clients, first.rate, first.duration_seconds) == ("closed", 4, None, None)
    assert 5 < report.figures["capacity_low_per_second"] < 12


def test_the_bound_on_runs_holds_and_is_said():
    server = PaperServer(requests_per_second=10)
    report = run_capacity(OPEN, server, target=LENIENT, start_rate=0.5, max_runs=3)
    assert len(server.calls) == 3
    assert "bound of 3 runs" in texts(report, VerdictKind.WARNING)


def test_refused_requests_are_misses():
    """FIG: a server that refuses keeps its latencies and loses its capacity."""
    server = PaperServer(requests_per_second=10, max_queued=2)
    report = run_capacity(OPEN, server, target=LENIENT, min_goodput=0.99, start_rate=20.0, max_runs=12)
    assert report.figures["capacity_high_per_second"] <= 10
    over = max(report.sections[0].results, key=lambda result: result.offered_per_second)
    assert over.ttft_seconds.p99 < 1.0
    assert over.goodput < 0.8


def test_a_growing_queue_is_not_held_however_lenient_the_target():
    endless = GoodputTarget(name="endless", ttft_seconds=1e6, tbt_seconds=1e6)
    report = run_capacity(OPEN, PaperServer(requests_per_second=10), target=endless, start_rate=40.0, max_runs=8)
    assert report.figures["capacity_high_per_second"] <= 20
    assert "queue was growing" in texts(report)


def test_a_close_call_is_measured_again_with_other_requests():
    class Borderline(PaperServer):
        """Of 50 requests, one is slow: 0.98, and 0.99 is wanted."""

        def __call__(self, settings, label):
            run = super().__call__(msgspec.structs.replace(settings, rate=1.0, duration_seconds=50.0), label)
            slow = run.requests[0]
            slow.chunk_times = [moment + 5 for moment in slow.chunk_times]
            slow.ended = slow.chunk_times[-1]
            return run

    server = Borderline(requests_per_second=1000)
    report = run_capacity(OPEN, server, target=LENIENT, start_rate=1.0, max_runs=2)
    assert [label for _, label in server.calls] == ["1 requests/s"] * 2
    assert report.sections[0].results[0].requests.offered > 70
    assert "close call" in texts(report, VerdictKind.WARNING)


def test_short_runs_cannot_see_a_growing_queue_and_say_so():
    settings = msgspec.structs.replace(OPEN, duration_seconds=10.0)
    report = run_capacity(settings, PaperServer(requests_per_second=100), target=LENIENT, start_rate=20.0, max_runs=2)
    assert "too short to see a queue grow" in texts(report, VerdictKind.WARNING)


def test_nothing_that_held_is_a_problem():
    hopeless = GoodputTarget(name="hopeless", ttft_seconds=0.001, tbt_seconds=0.001)
    report = run_capacity(OPEN, PaperServer(), target=hopeless, start_rate=1.0, max_runs=4)
    assert report.figures["capacity_low_per_second"] is None
    assert "no rate that was tried held" in texts(report, VerdictKind.PROBLEM)


def test_brackets_in_words():
    assert "no upper end" in bracket_sentence(3.0, None, "x")
    assert "not found" in bracket_sentence(None, None, "x")
    assert bracket_for([], 0.9) == (None, None)


@pytest.mark.parametrize("share", [0, 1.5])
def test_a_wanted_share_is_a_share(share):
    with pytest.raises(ValueError, match="share"):
        run_capacity(OPEN, PaperServer(), min_goodput=share)


def test_a_single_run_names_over_saturation_and_its_absence():
    calm = run_single(msgspec.structs.replace(OPEN, rate=3.0), PaperServer(requests_per_second=10))
    assert "Not over-saturated" in texts(calm, VerdictKind.OK)
    flooded = run_single(msgspec.structs.replace(OPEN, rate=20.0), PaperServer(requests_per_second=10))
    assert "Over-saturated" in texts(flooded, VerdictKind.WARNING)
    closed = run_single(CLOSED, PaperServer())
    assert "saturated" not in texts(closed)
    assert closed.kind == "run"
    assert closed.sections[0].results[0].requests.completed == 12
