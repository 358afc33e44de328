"""Times by phase: what is counted, and how a program and Prometheus see it."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import shardam
from shardam._session_options import SessionOptions
from shardam._timings import BUCKET_BOUNDS_S, Timings
from shardam.cluster import Cluster
from shardam.errors import BadOption


def unopened_cluster(name: str = "prod") -> Cluster:
    return Cluster(SessionOptions("redis://127.0.0.1:1/0", name, None, 1.0))


def test_times_are_counted_by_phase() -> None:
    cluster = unopened_cluster()
    for seconds in (0.001, 0.003, 0.002):
        cluster._timings.add("wire", seconds)
    cluster._timings.add("unique", 0.5)
    times = cluster.timings()
    assert list(times) == ["unique", "wire"], "in the order in which a step meets them"
    assert times["wire"].count == 3
    assert times["wire"].total_s == pytest.approx(0.006)
    assert times["wire"].mean_s == pytest.approx(0.002)
    assert times["wire"].max_s == 0.003
    assert 0.001 <= times["wire"].p50_s <= 0.004
    assert times["wire"].p50_s <= times["wire"].p99_s <= times["wire"].max_s


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 1e-6, 3.3e-5, 0.25, 1000.0])
def test_a_single_time_is_its_own_quantile_within_a_factor_of_two(seconds: float) -> None:
    timings = Timings()
    timings.add("step", seconds)
    times = timings.by_phase()["step"]
    for estimate in (times.p50_s, times.p99_s):
        assert seconds / 2 <= estimate <= seconds or (seconds < BUCKET_BOUNDS_S[0] and 0 <= estimate <= seconds)


def test_quantiles_tell_a_tail_from_the_middle() -> None:
    timings = Timings()
    for _ in range(98):
        timings.add("wait", 0.001)
    for _ in range(2):
        timings.add("wait", 1.0)
    times = timings.by_phase()["wait"]
    assert 0.0005 <= times.p50_s <= 0.001
    assert 0.5 <= times.p99_s <= 1.0


def test_a_negative_time_of_two_clocks_counts_as_none() -> None:
    timings = Timings()
    timings.add("wire", -0.5)
    assert timings.by_phase()["wire"].total_s == 0.0


def test_reset_counts_from_zero() -> None:
    cluster = unopened_cluster()
    cluster._timings.add("kernel", 1.0)
    assert cluster.timings(reset=True)["kernel"].count == 1
    assert cluster.timings() == {}
    with pytest.raises(BadOption, match="reset must be True or False, got 1"):
        cluster.timings(reset=1)  # type: ignore[arg-type]


def test_no_time_is_lost_between_threads() -> None:
    timings = Timings()

    def count() -> None:
        for _ in range(2_000):
            timings.add("wire", 0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timings.by_phase()["wire"].count == 8_000


def test_what_is_measured_counts_unless_it_fails() -> None:
    timings = Timings()
    with timings.measured("step"):
        pass
    with pytest.raises(KeyError), timings.measured("step"):
        raise KeyError
    assert timings.by_phase()["step"].count == 1


def test_prometheus_sees_a_histogram_by_cluster_and_phase() -> None:
    first, second = unopened_cluster("a"), unopened_cluster("b")
    first._timings.add("wire", 3e-6)
    first._timings.add("wire", 1e9)
    second._timings.add("step", 0.5)
    registry = CollectorRegistry()
    registry.register(shardam.timings_collector(first, second))
    lines = generate_latest(registry).decode().splitlines()
    assert "# TYPE shardam_client_phase_seconds histogram" in lines
    assert sum(line.startswith("# TYPE") for line in lines) == 1
    bucket = 'shardam_client_phase_seconds_bucket{cluster="a",le="%s",phase="wire"} %s'
    assert bucket % ("2e-06", "0.0") in lines
    assert bucket % ("4e-06", "1.0") in lines
    assert bucket % ("+Inf", "2.0") in lines
    assert 'shardam_client_phase_seconds_count{cluster="a",phase="wire"} 2.0' in lines
    assert 'shardam_client_phase_seconds_sum{cluster="b",phase="step"} 0.5' in lines


def test_a_collector_takes_clusters_and_each_name_once() -> None:
    with pytest.raises(BadOption, match="at least one cluster"):
        shardam.timings_collector()
    with pytest.raises(BadOption, match="each name once"):
        shardam.timings_collector(unopened_cluster(), unopened_cluster())
    with pytest.raises(BadOption, match="takes clusters"):
        shardam.timings_collector("prod")  # type: ignore[arg-type]
