"""The exposition: MET-01, MET-02, MET-08, MET-10, MET-11, and counters over restarts of the worker."""

import math
from collections import Counter

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.ipc.status import StatusPage
from headrace.protocol.stalls import StallCause
from headrace.protocol.traffic import MAX_CLASSES, Tenant, TrafficPolicy
from headrace.telemetry import catalog
from headrace.telemetry.catalog import METRICS
from headrace.telemetry.export import MetricsExporter, WorkerTotals
from headrace.telemetry.meters import GatewayMeters
from headrace.telemetry.metric import STEP_STAGES, Kind, Source
from headrace.telemetry.status_fields import COUNTER_FIELDS, STATUS_FIELDS, StepMeter, WorkerState, blocked_by_number
from tests.telemetry.identities import identity

CLOCKED = ("headrace_gateway_cpu_seconds_total",)  # never the same twice


class Server:
    """A gateway's metrics over a real status page."""

    def __init__(self, model_name="", traffic=None):
        self.meters = GatewayMeters(traffic=traffic)
        self.page = StatusPage.create(bytearray(StatusPage.size_bytes(STATUS_FIELDS)), STATUS_FIELDS)
        self.exporter = MetricsExporter(
            self.meters, self.page.read, {"request": lambda: 0.25, "event": lambda: 0.0}, model_name=model_name
        )
        for name in self.meters.traffic.class_names:
            self.exporter.add_probe("headrace_predicted_wait_seconds", lambda: 0.0, name)
        self.exporter.add_probe("headrace_admission_promises", lambda: 0)

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
    assert {key: number for key, number in samples.items() if number and key[0] not in CLOCKED} == {
        ("headrace_ring_fill_ratio", ("ring", "request")): 0.25
    }


def test_met_10_every_metric_has_the_type_that_the_catalogue_says(server):
    server.meters.count_http("/metrics", 200)
    families = {family.name: family for family in text_string_to_metric_families(server.exporter.exposition()[0].decode())}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help
        assert family.samples, metric.name


def test_met_10_the_text_is_what_the_official_library_would_write():
    """Its parser reads our text into families, and its writer makes the same text of them."""
    server = Server('strange "name" \\ with\na line')
    server.start_worker(1)
    server.meter.observe_step(3_141_592_653, 123_456)
    server.write(num_generated_tokens=12_345_678_901, num_blocks=3, num_free_blocks=1, num_running=2)
    server.meters.count_http("/metrics", 200)
    timeline = server.meters.start_request(identity(10**7), 0)
    timeline.count_tokens(3, 123_456_789)
    timeline.end("stop", 10**15)
    body = server.exporter.exposition()[0]

    class Parsed:
        def collect(self):
            yield from text_string_to_metric_families(body.decode())

    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Parsed())
    assert prometheus_client.generate_latest(registry).decode() == body.decode()


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


def test_met_01_02_no_label_takes_a_value_from_outside():
    """MET-01, MET-02: paths, models, users, tenants, classes, codes and reasons of clients add no series."""
    tenants = (*TrafficPolicy().tenants, Tenant(name="alice"))
    server = Server("served", TrafficPolicy(tenants=tenants))
    server.meters.count_http("/no/such/path", 404)
    before = server.scrape()
    for number in range(1000):
        strange = f'{number}"\n\\{{}}é'
        server.meters.count_http(f"/{strange}", 404)
        server.meters.count_rejection(f"code{strange}")
        timeline = server.meters.start_request(
            identity(1, request_id=number, service_class=f"class{strange}", tenant=f"user{strange}"), 0
        )
        timeline.start(1)
        timeline.count_tokens(2, 2)
        timeline.end(f"reason{strange}", 3)
    server.meters.count_rejection("overloaded")
    samples = server.scrape()
    assert value(samples, "admission_rejections_total", code="other", model_name="served") == 1000
    assert value(samples, "admission_rejections_total", code="overloaded", model_name="served") == 1
    assert value(samples, "request_success_total", finished_reason="error", model_name="served") == 1000
    named = {"class": "standard", "model_name": "served"}
    assert value(samples, "time_to_first_token_seconds_count", **named) == 1000
    assert value(samples, "tenant_requests_total", tenant="other", model_name="served") == 1000
    assert value(samples, "tenant_requests_total", tenant="alice", model_name="served") == 0
    assert set(samples) - set(before) == {
        ("headrace_admission_rejections_total", ("code", "other"), ("model_name", "served"))
    }, "the one value that stands for all unknown ones"


@pytest.mark.parametrize("model_name", ["served", 'a "strange"\n\\name'])
def test_every_sample_but_those_of_http_names_the_model(model_name):
    server = Server(model_name)
    server.meters.count_http("/metrics", 200)
    samples = server.scrape()
    for name, *labels in samples:
        assert dict(labels).get("model_name") == (None if name == "headrace_http_requests_total" else model_name)


def test_the_labels_of_a_family_are_always_the_same(server):
    """No family mixes samples with and without a label: sums over it would count twice."""
    server.start_worker(1)
    server.meters.count_http("/metrics", 200)
    for family in text_string_to_metric_families(server.exporter.exposition()[0].decode()):
        names = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert len(names) == 1, family.name


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


def test_routers_find_the_gauges_under_vllms_names_too(server):
    server.start_worker(1)
    server.write(num_running=3, num_waiting=4, num_blocks=100, num_free_blocks=50, num_cached_blocks=25)
    samples = server.scrape()
    for name, expected in (("num_requests_running", 3), ("num_requests_waiting", 4), ("kv_cache_usage_perc", 0.25)):
        assert samples[(f"vllm:{name}",)] == value(samples, name) == expected


def test_gauges_by_class_and_by_what_blocks_admission(server):
    server.start_worker(1)
    by_class = {f"num_{what}_class_{index}": 10 * index + extra for index in range(3) for what, extra in GAUGE_EXTRAS}
    server.write(blocked_by=blocked_by_number(StallCause.NO_BLOCKS), **by_class)
    samples = server.scrape()
    for index, name in enumerate(("interactive", "standard", "batch")):
        assert value(samples, "class_requests_running", **{"class": name}) == 10 * index + 1
        assert value(samples, "class_requests_waiting", **{"class": name}) == 10 * index + 2
    blocked = {cause.value: value(samples, "admission_blocked", cause=cause.value) for cause in StallCause}
    assert blocked == {cause.value: cause is StallCause.NO_BLOCKS for cause in StallCause}
    server.write(blocked_by=0)
    assert not any(number for key, number in server.scrape().items() if key[0] == "headrace_admission_blocked")


GAUGE_EXTRAS = (("running", 1), ("waiting", 2))


def fields_of(server, metric):
    """{labels: field of the status page}."""
    if metric.source is Source.WORKER:
        return {labels: field for _, labels, field in server.exporter._places(metric)}
    return {(metric.worker_value,): metric.field} if metric.field else {}


def test_every_field_is_on_the_status_page_and_shown_under_its_own_name(server):
    """Distinct numbers in all fields: a pair that is mixed up would show."""
    server.start_worker(1)
    numbers = {field: 1000 + index for index, field in enumerate(COUNTER_FIELDS)}
    server.page.write({**server.values, **numbers, "epoch": 1})
    samples = server.scrape()
    shown = set()
    for metric in METRICS:
        for labels, field in fields_of(server, metric).items():
            named = dict(zip(metric.labels, labels, strict=True))
            if metric.kind is Kind.COUNTER:
                shown.add(field)
                assert samples[(metric.name, *sorted(named.items()))] == numbers[field]
            elif metric.kind is Kind.HISTOGRAM:
                buckets = [name for name in COUNTER_FIELDS if name.startswith(f"{field}_bucket_")]
                assert len(buckets) == len(metric.buckets) + 1
                shown.update(buckets, [f"{field}_sum"])
                count = samples[(f"{metric.name}_count", *sorted(named.items()))]
                assert count == sum(numbers[name] for name in buckets)
                scale = 1e-9 if metric.unit == "seconds" else 1
                total = samples[(f"{metric.name}_sum", *sorted(named.items()))]
                assert total == pytest.approx(numbers[f"{field}_sum"] * scale)
            else:
                assert field == "" or field in STATUS_FIELDS
    assert set(COUNTER_FIELDS) - shown == {"num_steps"}, "it is the count of step durations"


def test_each_stage_of_a_step_has_its_series(server):
    server.start_worker(1)
    server.meter.observe_stages([1_000_000 * (index + 1) for index in range(len(STEP_STAGES))])
    server.write()
    samples = server.scrape()
    for index, stage in enumerate(STEP_STAGES):
        assert value(samples, "step_stage_seconds_count", stage=stage) == 1
        assert value(samples, "step_stage_seconds_sum", stage=stage) == pytest.approx(0.001 * (index + 1))


def test_histograms_of_the_status_page_add_up_over_lives(server):
    for epoch in (1, 2):
        server.start_worker(epoch)
        server.meter.observe_evictions([(2_000_000_000, 100_000_000)] * epoch)
        server.write(num_evictions=epoch)
        server.exporter.worker_exited()
    samples = server.scrape()
    assert value(samples, "kv_block_evictions_total") == 3
    assert value(samples, "kv_block_lifetime_seconds_count") == 3
    assert value(samples, "kv_block_lifetime_seconds_sum") == pytest.approx(6.0)
    assert value(samples, "kv_block_lifetime_seconds_bucket", le="1.0") == 0
    assert value(samples, "kv_block_idle_before_evict_seconds_bucket", le="0.1") == 3


def test_probes_and_the_worker_share_a_family(server):
    server.start_worker(1)
    server.write(num_event_ring_full=4, num_record_lines=50, num_record_drops=6)
    server.exporter.add_probe("headrace_ring_full_total", lambda: 3, "request")
    server.exporter.add_probe("headrace_record_lines_total", lambda: 70, "gateway")
    samples = server.scrape()
    assert (value(samples, "ring_full_total", ring="request"), value(samples, "ring_full_total", ring="event")) == (3, 4)
    lines = {process: value(samples, "record_lines_total", process=process) for process in ("gateway", "worker")}
    assert lines == {"gateway": 70, "worker": 50}
    assert value(samples, "record_drops_total", process="worker") == 6


def test_a_probe_for_what_is_not_probed_is_refused(server):
    for name, labels in (("headrace_worker_up", ()), ("nothing", ()), ("headrace_ring_full_total", ())):
        with pytest.raises(ValueError, match="takes no probe"):
            server.exporter.add_probe(name, lambda: 0, *labels)


def test_stalls_are_shown_in_seconds(server):
    timeline = server.meters.start_request(identity(), 0)
    timeline.note_cut_off(2_500_000_000, None, lambda: StallCause.NO_SLOT)
    samples = server.scrape()
    assert value(samples, "stalls_total", cause="no_slot") == 1
    assert value(samples, "stall_seconds_total", cause="no_slot") == pytest.approx(2.5)
    assert value(samples, "stalls_total", cause="slow_reader") == 0


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
    server.exporter._probes["headrace_ring_fill_ratio"][("request",)] = broken
    server.meters.count_worker_restart()
    samples = server.scrape()
    assert value(samples, "generation_tokens_total") == 7
    assert value(samples, "num_requests_running") == 0
    assert value(samples, "worker_restarts_total") == 1
    assert value(samples, "metrics_faults_total") == 2
    assert value(samples, "ring_fill_ratio", ring="event") == 0


def test_no_status_page_at_all():
    exporter = MetricsExporter(GatewayMeters(), lambda: None)
    assert b"headrace_num_requests_running 0.0" in exporter.exposition()[0]


class TestCatalogue:
    def test_names(self):
        names = [metric.name for metric in METRICS]
        assert len(set(names)) == len(names)
        for metric in METRICS:
            assert metric.name.startswith(("headrace_", "vllm:"))
            assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
            assert metric.help.endswith(".")
            assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
            assert metric.name.removesuffix("_total").endswith("_seconds") is (
                metric.unit == "seconds" and "_seconds_per_" not in metric.name
            )
            assert metric.is_of_model is (metric.name != "headrace_http_requests_total")
            assert len(metric.labels) <= (2 if metric.source is Source.GATEWAY else 1)

    def test_latencies_of_requests_reach_from_a_millisecond_to_minutes_and_have_a_class(self):
        latencies = [metric for metric in METRICS if metric.labels == ("class",) and metric.kind is Kind.HISTOGRAM]
        assert len(latencies) == 7
        for metric in latencies:
            assert metric.unit == "seconds"
            assert (metric.buckets[0], metric.buckets[-1]) == (0.001, 300.0)

    def test_the_ones_of_the_field_are_there(self):
        expected = {
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
            *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
            *("request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "iteration_tokens", "request_prefill_time_seconds"),
            *("request_decode_time_seconds", "request_time_per_output_token_seconds"),
        }
        assert {f"headrace_{name}" for name in expected} <= set(catalog.BY_NAME)

    def test_labels_have_their_values(self):
        values = catalog.label_values(TrafficPolicy())
        for metric in METRICS:
            assert set(metric.labels) <= set(values)
        for metric in METRICS:
            if metric.worker_value:
                assert metric.worker_value in values[metric.labels[0]][0]
        assert len(values["class"][0]) <= MAX_CLASSES

    def test_status_fields_repeat_nothing(self):
        assert len(set(STATUS_FIELDS)) == len(STATUS_FIELDS)
        filled = {}
        StepMeter().fill(filled)
        assert set(filled) < set(COUNTER_FIELDS)
