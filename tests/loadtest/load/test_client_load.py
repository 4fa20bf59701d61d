"""When the client is called a bottleneck, and when not: each threshold, both sides."""

import pytest

from headrace.loadtest.client_load import CpuSample, Lags, cpu_share, judge_client, missed_probes, nearest_rank
from headrace.loadtest.records import ClientLoad


def judge(
    *,
    share: float = 0.3,
    own_share: float = 0.1,
    send_ms: tuple[float, ...] = (1.0,),
    loop_ms: tuple[float, ...] = (1.0,),
    ttft: float | None = 0.1,
) -> ClientLoad:
    return judge_client(
        client_samples=[[CpuSample(0.0, 5.0), CpuSample(10.0, 5.0 + 10 * used)] for used in (share, 0.2)],
        coordinator_samples=[CpuSample(0.0, 1.0), CpuSample(10.0, 1.0 + 10 * own_share)],
        lags=Lags(send=[(5.0, lag / 1e3) for lag in send_ms], loop=[(5.0, lag / 1e3) for lag in loop_ms]),
        median_ttft_seconds=ttft,
        window=(0.0, 10.0),
    )


def test_an_idle_client_is_no_bottleneck_and_its_figures_are_right() -> None:
    load = judge()
    assert (load.was_bottleneck, load.why, load.num_processes) == (False, "", 2)
    assert (load.cpu_cores_used, load.max_process_cpu_share) == pytest.approx((0.6, 0.3))
    assert (load.send_lag_p99_seconds, load.loop_lag_p99_seconds) == pytest.approx((0.001, 0.001))


@pytest.mark.parametrize(
    ("below", "above", "word"),
    [
        ({"share": 0.84}, {"share": 0.86}, "% of a core"),
        ({"own_share": 0.84}, {"own_share": 0.86}, "% of a core"),
        ({"send_ms": (9.9, 9.9)}, {"send_ms": (10.1, 10.1)}, "ms late (p99; limit 10.0 ms)"),
        ({"send_ms": (99.0, 99.0), "ttft": 2.0}, {"send_ms": (101.0, 101.0), "ttft": 2.0}, "limit 100.0 ms"),
        ({"send_ms": (9.9, 9.9), "ttft": None}, {"send_ms": (10.1, 10.1), "ttft": None}, "limit 10.0 ms"),
        ({"loop_ms": (19.0, 19.0)}, {"loop_ms": (21.0, 21.0)}, "event loops woke"),
        ({"loop_ms": (1.0, 500.0)}, {"loop_ms": (400.0, 500.0)}, "event loops woke"),  # one hiccup is no verdict
        ({"send_ms": (1.0,) * 198 + (50.0,) * 2}, {"send_ms": (1.0,) * 190 + (50.0,) * 10}, "requests were sent"),
    ],
)
def test_each_threshold_fires_above_and_only_above(below: dict[str, object], above: dict[str, object], word: str) -> None:
    assert not judge(**below).was_bottleneck  # type: ignore[arg-type]
    load = judge(**above)  # type: ignore[arg-type]
    assert load.was_bottleneck
    assert word in load.why


def test_lags_outside_of_the_window_do_not_count() -> None:
    load = judge_client(
        client_samples=[[]],
        coordinator_samples=[],
        lags=Lags(send=[(0.5, 9.0)] * 5, loop=[(19.0, 9.0)] * 5),
        median_ttft_seconds=None,
        window=(1.0, 10.0),
    )
    assert load == ClientLoad(
        num_processes=1,
        cpu_cores_used=0.0,
        max_process_cpu_share=0.0,
        send_lag_p50_seconds=0.0,
        send_lag_p99_seconds=0.0,
        loop_lag_p99_seconds=0.0,
    )


def test_cpu_share_is_that_of_the_samples_around_the_window() -> None:
    samples = [CpuSample(at, cpu) for at, cpu in ((-0.1, 3.0), (1.0, 3.5), (2.0, 3.6), (4.0, 3.8), (9.0, 8.0))]
    assert cpu_share(samples, (1.5, 3.0)) == pytest.approx(0.1)
    assert cpu_share(samples, (-5.0, 50.0)) == pytest.approx(5.0 / 9.1)
    assert cpu_share(samples[:1], (0.0, 1.0)) == 0.0


def test_a_long_standstill_has_as_many_samples_as_the_time_it_took() -> None:
    assert missed_probes(0.001, 0.02) == [0.001]
    assert missed_probes(0.05, 0.02) == pytest.approx([0.05, 0.03, 0.01])
    assert len(missed_probes(1e6, 0.02)) == 1001


def test_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [nearest_rank(values, share) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [1, 1, 50, 99, 100]
    assert nearest_rank([], 0.5) == 0.0
