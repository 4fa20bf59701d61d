from headrace.protocol.stalls import StallCause
from headrace.protocol.traffic import MAX_CLASSES
from headrace.telemetry.metric import STEP_STAGES
from headrace.telemetry.status_fields import (
    COUNTER_FIELDS,
    HISTOGRAMS,
    RUNNING_CLASS_FIELDS,
    STATUS_FIELDS,
    WAITING_CLASS_FIELDS,
    StepMeter,
    blocked_by_cause,
    blocked_by_number,
    bucket_fields,
    histogram_fields,
)


def test_each_field_once_and_every_histogram_among_the_counters():
    assert len(set(STATUS_FIELDS)) == len(STATUS_FIELDS)
    for prefix, bounds in HISTOGRAMS.items():
        assert list(bounds) == sorted(set(bounds))
        assert set(histogram_fields(prefix, bounds)) <= set(COUNTER_FIELDS)
    assert len(RUNNING_CLASS_FIELDS) == len(WAITING_CLASS_FIELDS) == MAX_CLASSES
    assert {f"stage_{stage}" for stage in STEP_STAGES} <= set(HISTOGRAMS)


def test_what_blocks_admission_survives_being_a_number():
    numbers = [blocked_by_number(cause) for cause in StallCause]
    assert numbers == list(range(1, len(StallCause) + 1))
    assert [blocked_by_cause(number) for number in numbers] == list(StallCause)
    assert blocked_by_number(None) == 0
    assert blocked_by_cause(0) is blocked_by_cause(len(StallCause) + 1) is blocked_by_cause(-1) is None


def test_a_step_and_its_stages_fall_into_their_buckets():
    meter = StepMeter()
    meter.observe_step(5_000_000, num_tokens=20, num_rows=5, num_decode_rows=4)
    meter.observe_stages([10_000, 20_000, 20_001, 10_000_000_001, 0, 1, 2])
    meter.observe_evictions([(3_000_000_000, 10_000_000)])
    values = {}
    meter.fill(values)

    def place(prefix):
        counts = [values[name] for name in bucket_fields(prefix, len(HISTOGRAMS[prefix]))]
        assert sum(counts) == 1
        return counts.index(1)

    assert (values["num_steps"], values["num_prefill_tokens"], values["num_decode_tokens"]) == (1, 16, 4)
    assert [place(f"stage_{stage}") for stage in STEP_STAGES] == [0, 0, 1, 14, 0, 0, 0]  # bounds are inclusive
    assert HISTOGRAMS["step_rows"][place("step_rows")] == 8
    assert HISTOGRAMS["iteration_tokens"][place("iteration_tokens")] == 32
    assert HISTOGRAMS["block_idle"][place("block_idle")] == 10_000_000
    assert HISTOGRAMS["block_lifetime"][place("block_lifetime")] >= 3_000_000_000
    assert (values["block_lifetime_sum"], values["block_idle_sum"]) == (3_000_000_000, 10_000_000)
    assert set(values) < set(COUNTER_FIELDS)
