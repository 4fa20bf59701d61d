"""The exposition: MET-01, MET-02, MET-08, MET-10, MET-11, and counters over restarts of the worker."""

import math
from collections import Counter

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.ipc.status import StatusPage
from headrace.telemetry import catalog
from headrace.telemetry.catalog import METRICS, Kind
from headrace.telemetry.export import MetricsExporter, WorkerTotals
from headrace.telemetry.meters import GatewayMeters
from headrace.telemetry.status_fields import COUNTER_FIELDS, STATUS_FIELDS, StepMeter, WorkerState


class Server:
    """A gateway's metrics over a real status page."""

    def __init__(self):
        self.meters = GatewayMeters()
        self.page = StatusPage.create(bytearray(StatusPage.size_bytes(STATUS_FIELDS)), STATUS_FIELDS)
        self.exporter = MetricsExporter(self.meters, self.page.read, {"request_0": lambda: 0.25, "event_0": lambda: 0.0})

    def start_worker(self, epoch):
        self.values = {**dict.fromkeys(STATUS_FIELDS, 0), "epoch": epoch, "pid": 9, "state": WorkerState.READY}
        self.meter = StepMeter()
        self.exporter.worker_ready()
        self.page.write(self.values)

    def write(self, **values):
        self.values |= values
        self.meter.fill(self.values)
        self.page.write(self.values)

    def scrape(self):
        """{(sample name, labels): value}; fails on anything the official parser refuses or a family that comes twice."""
        body, content_type = self.exporter.exposition()
        assert content_type == "text/plain; version=0.0.4; charset=utf-8"
        text = body.decode()
        for keyword in ("HELP", "TYPE"):
            named = [line.split()[2] for line in text.splitlines() if line.startswith(f"# {keyword} ")]
            assert max(Counter(named).values()) == 1
            assert named == [metric.name for metric in METRICS]
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                assert key not in samples
                assert math.isfinite(sample.value)
                samples[key] = sample.value
        return samples


@pytest.fixture
def server():
    return Server()


def value(samples, name, **labels):
    return samples[(f"headrace_{name}", *sorted(labels.items()))]


def test_met_10_a_fresh_server_is_valid_and_says_zero(server):
    samples = server.scrape()
    assert len(samples) > 100
    assert {key: number for key, number in samples.items() if number} == {
        ("headrace_ring_fill_ratio", ("ring", "request_0")): 0.25
    }


def test_met_10_every_metric_has_the_type_that_the_catalogue_says(server):
    server.meters.count_http("/metrics", 200)
    families = {family.name: family for family in text_string_to_metric_families(server.exporter.exposition()[0].decode())}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
        assert family.samples, metric.name


def test_nothing_is_put_into_the_global_registry(server):
    server.scrape()
    assert not [family.name for family in prometheus_client.REGISTRY.collect() if family.name.startswith("headrace")]


def test_met_01_scanner_paths_are_one_label(server):
    for number in range(1000):
        server.meters.count_http(f'/wp-admin/{number}"\n\\', 404)
    server.meters.count_http("/v1/chat/completions", 200)
    server.meters.count_http("/v1/chat/completions", 299)
    samples = server.scrape()
    assert value(samples, "http_requests_total", route="unmatched", status="404") == 1000
    assert value(samples, "http_requests_total", route="/v1/chat/completions", status="200") == 1
    assert value(samples, "http_requests_total", route="/v1/chat/completions", status="other") == 1
    assert sum(key[0] == "headrace_http_requests_total" for key in samples) == 3


def test_met_02_no_label_takes_a_value_from_outside(server):
    num_before = len(server.scrape())
    for number in range(1000):
        server.meters.count_rejection(f"code\n{number}")
        timeline = server.meters.start_request(0, 1)
        timeline.end(f"reason{number}", 1)
    server.meters.count_rejection("overloaded")
    samples = server.scrape()
    assert value(samples, "admission_rejections_total", code="other") == 1000
    assert value(samples, "admission_rejections_total", code="overloaded") == 1
    assert value(samples, "request_success_total", finished_reason="error") == 1000
    assert len(samples) == num_before + 1


def test_met_11_a_step_is_counted_once_whatever_is_in_it(server):
    server.start_worker(1)
    for _ in range(10):
        server.meter.observe_step(20_000_000, 8)
    server.write(num_running=8, num_prompt_tokens=30, num_cached_prompt_tokens=50)
    samples = server.scrape()
    assert value(samples, "step_duration_seconds_count") == 10
    assert value(samples, "step_duration_seconds_sum") == pytest.approx(0.2)
    assert value(samples, "step_duration_seconds_bucket", le="0.015") == 0
    assert value(samples, "step_duration_seconds_bucket", le="0.02") == 10
    assert value(samples, "iteration_tokens_sum") == 80
    assert value(samples, "iteration_tokens_bucket", le="4.0") == 0
    assert value(samples, "iteration_tokens_bucket", le="+Inf") == 10
    assert value(samples, "prompt_tokens_total") == 30
    assert value(samples, "prompt_tokens_cached_total") == 50


def test_gauges_show_the_worker_while_it_lives(server):
    server.start_worker(1)
    server.write(num_running=3, num_waiting=4, num_blocks=100, num_free_blocks=50, num_cached_blocks=25)
    samples = server.scrape()
    assert value(samples, "worker_up") == 1
    assert value(samples, "num_requests_running") == 3
    assert value(samples, "num_requests_waiting") == 4
    assert value(samples, "kv_cache_usage_perc") == 0.25
    server.exporter.worker_exited()
    samples = server.scrape()
    for name in ("worker_up", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(samples, name) == 0


def test_every_counter_field_is_shown_under_its_own_name(server):
    """Distinct numbers in all fields: a pair that is mixed up would show."""
    server.start_worker(1)
    fields = [metric.field for metric in METRICS if metric.field and metric.kind is not Kind.HISTOGRAM]
    assert set(fields) <= set(STATUS_FIELDS)
    server.page.write({**server.values, **{field: 1000 + number for number, field in enumerate(fields)}})
    samples = server.scrape()
    for metric in METRICS:
        if metric.field in fields:
            assert samples[(metric.name,)] == 1000 + fields.index(metric.field)


def test_counters_do_not_go_back_when_the_worker_is_replaced(server):
    server.start_worker(1)
    server.meter.observe_step(5_000_000, 4)
    server.write(num_generated_tokens=100)
    server.scrape()
    server.write(num_generated_tokens=130)
    server.exporter.worker_exited()
    assert value(server.scrape(), "generation_tokens_total") == 130
    server.start_worker(2)
    assert value(server.scrape(), "generation_tokens_total") == 130
    server.meter.observe_step(5_000_000, 4)
    server.write(num_generated_tokens=5)
    samples = server.scrape()
    assert value(samples, "generation_tokens_total") == 135
    assert value(samples, "step_duration_seconds_count") == 2
    assert value(samples, "step_duration_seconds_sum") == pytest.approx(0.01)


def test_a_snapshot_of_an_earlier_life_and_a_counter_that_goes_back_change_nothing():
    totals = WorkerTotals()
    zeros = dict.fromkeys(COUNTER_FIELDS, 0)
    for epoch, count, expected in ((1, 10, 10), (2, 5, 15), (1, 99, 15), (2, 3, 15), (2, 7, 17), (5, 1, 18)):
        totals.note({**zeros, "epoch": epoch, "num_generated_tokens": count})
        assert totals.total("num_generated_tokens") == expected


def test_met_08_a_status_page_that_cannot_be_read_leaves_the_rest(server):
    server.start_worker(1)
    server.write(num_generated_tokens=7, num_running=2)
    server.scrape()

    def broken():
        raise RuntimeError("no page")

    server.exporter._read_status = broken
    server.exporter._ring_fill["request_0"] = broken
    server.meters.count_worker_restart()
    samples = server.scrape()
    assert value(samples, "generation_tokens_total") == 7
    assert value(samples, "num_requests_running") == 0
    assert value(samples, "worker_restarts_total") == 1
    assert value(samples, "metrics_faults_total") == 2
    assert value(samples, "ring_fill_ratio", ring="event_0") == 0


def test_no_status_page_at_all():
    exporter = MetricsExporter(GatewayMeters(), lambda: None)
    assert b"headrace_num_requests_running 0.0" in exporter.exposition()[0]


class TestCatalogue:
    def test_names(self):
        names = [metric.name for metric in METRICS]
        assert len(set(names)) == len(names)
        for metric in METRICS:
            assert metric.name.startswith("headrace_")
            assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
            assert metric.help.endswith(".")
            assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)

    def test_latency_buckets_reach_from_a_millisecond_to_minutes(self):
        latencies = [metric for metric in METRICS if metric.name.endswith("_seconds")]
        assert len(latencies) == 5
        for metric in latencies:
            assert metric.unit == "seconds"
            assert (metric.buckets[0], metric.buckets[-1]) == (0.001, 300.0)

    def test_the_ones_of_the_field_are_there(self):
        expected = {
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
            *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
            *("request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "iteration_tokens"),
        }
        assert {f"headrace_{name}" for name in expected} <= set(catalog.BY_NAME)

    def test_status_fields_repeat_nothing(self):
        assert len(set(STATUS_FIELDS)) == len(STATUS_FIELDS)
        values = {}
        StepMeter().fill(values)
        assert set(values) < set(COUNTER_FIELDS)
