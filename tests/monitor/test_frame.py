"""From two looks to one frame."""

import dataclasses
import pathlib
import re
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.monitor import frame as names
from headrace.monitor.frame import frame_of
from headrace.monitor.model import ClassLoad, Frame, LongestStall, Percentiles, StallSum, Status
from headrace.monitor.scrape import Scrape
from headrace.telemetry import catalog
from tests.monitor.expositions import histogram, live, report, scrape, stall

URL = "http://server"
EARLIER = """# TYPE headrace_worker_up gauge
headrace_worker_up{model_name="m"} 1
# TYPE headrace_generation_tokens counter
headrace_generation_tokens_total{model_name="m"} 1000
# TYPE headrace_prompt_tokens counter
headrace_prompt_tokens_total{model_name="m"} 500
# TYPE headrace_prompt_tokens_cached counter
headrace_prompt_tokens_cached_total{model_name="m"} 100
# TYPE headrace_request_success counter
headrace_request_success_total{finished_reason="stop"} 10
# TYPE headrace_stalls counter
headrace_stalls_total{cause="prefill"} 1
headrace_stalls_total{cause="no_slot"} 1
# TYPE headrace_stall_seconds counter
headrace_stall_seconds_total{cause="prefill"} 0.5
headrace_stall_seconds_total{cause="no_slot"} 0.5
# TYPE headrace_prefix_cache_queries counter
headrace_prefix_cache_queries_total 100
# TYPE headrace_prefix_cache_hits counter
headrace_prefix_cache_hits_total 10
# TYPE headrace_gateway_cpu_seconds counter
headrace_gateway_cpu_seconds_total 5.0
# TYPE headrace_gateway_tokens counter
headrace_gateway_tokens_total 1000
"""
LATER = """# TYPE headrace_worker_up gauge
headrace_worker_up{model_name="m"} 1
# TYPE headrace_worker_restarts counter
headrace_worker_restarts_total 2
# TYPE headrace_generation_tokens counter
headrace_generation_tokens_total{model_name="m"} 1400
# TYPE headrace_prompt_tokens counter
headrace_prompt_tokens_total{model_name="m"} 600
# TYPE headrace_prompt_tokens_cached counter
headrace_prompt_tokens_cached_total{model_name="m"} 400
# TYPE headrace_request_success counter
headrace_request_success_total{finished_reason="stop"} 16
headrace_request_success_total{finished_reason="length"} 2
# TYPE headrace_stalls counter
headrace_stalls_total{cause="prefill"} 3
headrace_stalls_total{cause="no_slot"} 1
# TYPE headrace_stall_seconds counter
headrace_stall_seconds_total{cause="prefill"} 1.75
headrace_stall_seconds_total{cause="no_slot"} 0.5
# TYPE headrace_prefix_cache_queries counter
headrace_prefix_cache_queries_total 500
# TYPE headrace_prefix_cache_hits counter
headrace_prefix_cache_hits_total 110
# TYPE headrace_num_requests_running gauge
headrace_num_requests_running{model_name="m"} 3
# TYPE headrace_class_requests_running gauge
headrace_class_requests_running{class="batch"} 2
headrace_class_requests_running{class="standard"} 1
# TYPE headrace_class_requests_waiting gauge
headrace_class_requests_waiting{class="batch"} 7
# TYPE headrace_admission_blocked gauge
headrace_admission_blocked{cause="no_slot"} 1
headrace_admission_blocked{cause="no_blocks"} 0
# TYPE headrace_kv_cache_usage_perc gauge
headrace_kv_cache_usage_perc 0.43
# TYPE headrace_ring_fill_ratio gauge
headrace_ring_fill_ratio{ring="event"} 0.25
# TYPE headrace_gateway_cpu_seconds_per_token gauge
headrace_gateway_cpu_seconds_per_token 0.000477
# TYPE headrace_gateway_cpu_seconds counter
headrace_gateway_cpu_seconds_total 5.0048
# TYPE headrace_gateway_tokens counter
headrace_gateway_tokens_total 1400
"""


def both() -> Frame:
    return frame_of(URL, scrape(EARLIER), scrape(LATER, 2.0), 10)


def leaves(value: object) -> list[float]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [float(value)] if isinstance(value, int | float) else []


def test_rates_are_what_was_added_over_the_window() -> None:
    frame = both()
    assert frame.window_seconds == 2.0
    assert frame.throughput.output_tokens_per_second == 200.0
    assert frame.throughput.prompt_tokens_per_second == 50.0
    assert frame.throughput.cached_share == 0.75
    assert frame.throughput.finished_per_second == {"length": 1.0, "stop": 3.0}
    assert frame.cache.hit_rate == 0.25
    assert frame.stalls == {"prefill": StallSum(count=2, seconds=1.25)}


def test_gauges_are_as_they_stand() -> None:
    frame = both()
    assert (frame.server.worker_up, frame.server.worker_restarts) == (True, 2)
    assert frame.batch.running == 3
    assert frame.batch.blocked_by == ["no_slot"]
    assert frame.batch.classes == {"batch": ClassLoad(running=2, waiting=7), "standard": ClassLoad(running=1)}
    assert frame.cache.usage == 0.43
    assert frame.gateway.ring_fill == {"event": 0.25}


def test_processor_time_per_token_is_of_the_window_and_not_known_without_tokens() -> None:
    assert both().gateway.cpu_seconds_per_token == pytest.approx(12e-6)
    assert frame_of(URL, scrape(LATER), scrape(LATER, 2.0), 10).gateway.cpu_seconds_per_token is None
    assert frame_of(URL, None, scrape(LATER), 10).gateway.cpu_seconds_per_token is None


@pytest.mark.parametrize(("shown", "meant"), [("-0.5", 0.0), ("0.43", 0.43), ("1.5", 1.0), ("1e300", 1.0)])
def test_shares_of_another_server_are_kept_between_0_and_1(shown: str, meant: float) -> None:
    frame = frame_of(
        URL, None, scrape(f'headrace_kv_cache_usage_perc {shown}\nheadrace_ring_fill_ratio{{ring="event"}} {shown}\n'), 10
    )
    assert (frame.cache.usage, frame.gateway.ring_fill) == (meant, {"event": meant})


def test_families_that_are_absent_are_not_known() -> None:
    frame = both()
    assert frame.throughput.refused_per_second is None
    assert frame.batch.waiting is None
    assert frame.batch.rows_per_step is None
    assert frame.cache.evictions_per_second is None
    assert frame.latency_seconds.ttft.all == Percentiles()


def test_without_an_earlier_look_there_are_gauges_but_no_rates() -> None:
    frame = frame_of(URL, None, scrape(LATER, 2.0), 10)
    assert frame.window_seconds is None
    assert frame.batch.running == 3
    assert frame.throughput.output_tokens_per_second is None
    assert frame.throughput.finished_per_second == {}
    assert frame.stalls is None


def test_latency_percentiles_are_of_the_window_and_by_class() -> None:
    name = "headrace_time_to_first_token_seconds"

    def text(batch: int, fast: int) -> str:
        one = histogram(name, {"0.1": 0, "1.0": batch, "+Inf": batch}, batch, 'class="batch"')
        other = histogram(name, {"0.1": fast, "1.0": fast, "+Inf": fast}, fast * 0.05, 'class="interactive"')
        return one + "\n".join(other.splitlines()[1:]) + "\n"

    ttft = frame_of(URL, scrape(text(100, 0)), scrape(text(110, 30), 1.0), 10).latency_seconds.ttft
    assert (ttft.all.count, ttft.by_class["batch"].count, ttft.by_class["interactive"].count) == (40, 10, 30)
    assert ttft.by_class["interactive"].p50 == pytest.approx(0.05)
    assert ttft.by_class["batch"].p50 == pytest.approx(0.55)
    assert ttft.all.p99 is not None
    assert 0.1 < ttft.all.p99 <= 1.0


def test_steps_their_rows_and_the_share_of_each_stage() -> None:
    def text(scale: int) -> str:
        step = histogram("headrace_step_duration_seconds", {"0.01": 0, "0.1": 10 * scale, "+Inf": 10 * scale}, scale)
        rows = histogram("headrace_step_rows", {"8.0": 10 * scale, "+Inf": 10 * scale}, 40 * scale)
        forward = histogram("headrace_step_stage_seconds", {"+Inf": 10 * scale}, 0.9 * scale, 'stage="forward"')
        sample = histogram("headrace_step_stage_seconds", {"+Inf": 10 * scale}, 0.1 * scale, 'stage="sample"')
        return step + rows + forward + "\n".join(sample.splitlines()[1:]) + "\n"

    batch = frame_of(URL, scrape(text(1)), scrape(text(3), 2.0), 10).batch
    assert batch.steps_per_second == 10.0
    assert batch.rows_per_step == 4.0
    assert batch.stage_shares == pytest.approx({"forward": 0.9, "sample": 0.1})
    assert batch.step_seconds.count == 20


@given(st.dictionaries(st.sampled_from(names.NAMES), st.tuples(st.floats(0, 1e9), st.floats(0, 1e9))), st.floats(0.01, 100))
def test_no_number_is_ever_negative_whatever_a_server_counts(values: dict[str, tuple[float, float]], seconds: float) -> None:
    looks = ["".join(f'{name}{{cause="a",class="b"}} {pair[index]!r}\n' for name, pair in values.items()) for index in (0, 1)]
    frame = frame_of(URL, scrape(looks[0]), scrape(looks[1], seconds), 10)
    assert all(leaf >= 0 for leaf in leaves(msgspec.to_builtins(frame)))


def test_after_a_restart_of_the_gateway_counters_count_from_0() -> None:
    frame = frame_of(URL, scrape(LATER), scrape(EARLIER, 2.0), 10)
    assert frame.throughput.output_tokens_per_second == 500.0
    assert frame.throughput.finished_per_second == {"stop": 5.0}
    assert frame.stalls is not None
    assert frame.stalls["no_slot"] == StallSum(count=1, seconds=0.5)


def test_the_state_of_the_server() -> None:
    ready = frame_of(URL, None, scrape(LATER), 10).server
    assert (ready.status, ready.reason) == (Status.READY, None)
    lost = frame_of(URL, None, scrape(LATER, is_ready=False, reason="no worker"), 10).server
    assert (lost.status, lost.reason) == (Status.NOT_READY, "no worker")
    mute = frame_of(URL, None, scrape(LATER, is_ready=None, reason="HTTP 404"), 10).server
    assert mute.status is Status.UNKNOWN
    gone = frame_of(URL, scrape(EARLIER), Scrape(1.0, 1.0, error="Connection refused"), 10)
    assert (gone.server.status, gone.server.reason) == (Status.UNREACHABLE, "Connection refused")
    assert gone.throughput.output_tokens_per_second is None
    assert gone.metrics_error is None


def test_metrics_that_are_refused_leave_the_rest() -> None:
    later = dataclasses.replace(scrape("", requests=live(report())), metrics=None, metrics_error="/metrics: HTTP 404")
    frame = frame_of(URL, scrape(EARLIER), later, 10)
    assert frame.metrics_error == "/metrics: HTTP 404"
    assert frame.window_seconds is None
    assert frame.requests.num_live == 1


def test_the_metrics_of_another_server_are_no_numbers() -> None:
    assert (
        frame_of(URL, None, scrape("vllm:num_requests_running 3\n"), 10).metrics_error
        == "/metrics has none of Headrace's metrics"
    )
    assert both().metrics_error is None


def test_requests_that_wait_come_first_then_the_oldest() -> None:
    found = live(
        report("old", 9000.0),
        report("older", 9500.0),
        report("stuck", 100.0, waiting_for="no_blocks", last_token_ms=None, output_tokens=0),
        report("young", 50.0, choice=2, stalls=[stall("prefill", 300.0), stall("slow_reader", 700.0)]),
    )
    rows = frame_of(URL, None, scrape("", requests=found), 10).requests.slowest
    assert [row.request_id for row in rows] == ["stuck", "older", "old", "young#2"]
    assert rows[0].waiting_for == "no_blocks"
    assert rows[0].last_token_seconds_ago is None
    assert rows[1].last_token_seconds_ago == 0.02
    assert rows[3].longest_stall == LongestStall(cause="slow_reader", seconds=0.7)
    assert len(frame_of(URL, None, scrape("", requests=found), 2).requests.slowest) == 2


def test_why_requests_are_not_shown() -> None:
    assert frame_of(URL, None, scrape("", requests_error="HTTP 403: no"), 10).requests.error == "HTTP 403: no"


def test_every_name_is_in_the_catalogue() -> None:
    assert len(names.NAMES) > 30
    assert set(names.NAMES) <= set(catalog.BY_NAME)


def test_every_key_of_the_json_is_in_its_page() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs" / "top.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(\w+)`", page[page.index("`--once --json`") :]))

    def keys(struct: type) -> set[str]:
        found = set()
        for field in msgspec.structs.fields(struct):
            found.add(field.encode_name)
            for part in (field.type, *typing.get_args(field.type)):
                if isinstance(part, type) and issubclass(part, msgspec.Struct):
                    found |= keys(part)
        return found

    assert len(keys(Frame)) > 60
    assert keys(Frame) <= described
