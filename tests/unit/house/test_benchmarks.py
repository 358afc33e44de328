"""The frame of the benchmarks: its verdicts and its figures; tests/demo/test_benchmarks.py runs them at smoke size."""

from __future__ import annotations

import pytest
from frame import EXIT_MET, EXIT_MISSED, EXIT_NOISY, Benchmark, Figure, Measured, Pair, main, measure, verdict


def _measured(ratio: float, control_spread: float) -> Measured:
    return Measured(Figure("a", ratio, "x/s", "b", 1.0, ratio, 10.0, 0.01), control_spread)


@pytest.mark.parametrize(
    ("ratio", "control_spread", "expected"),
    [
        (10.0, 0.01, EXIT_MET),
        (8.5, 0.01, EXIT_MET),
        (8.5, 0.5, EXIT_MET),
        (8.4, 0.01, EXIT_MISSED),
        (8.4, 0.11, EXIT_NOISY),
    ],
)
def test_a_goal_is_met_from_85_percent_on_and_missed_only_on_a_quiet_machine(
    ratio: float, control_spread: float, expected: int
) -> None:
    assert verdict([_measured(20.0, control_spread), _measured(ratio, control_spread)]) == expected


def test_a_figure_is_the_ratio_of_medians_of_interleaved_rounds() -> None:
    calls: list[str] = []
    pair = Pair(100.0, lambda: calls.append("ours"), lambda: calls.append("peer"))
    result = measure(Benchmark("a", "x/s", "b", 1.0, lambda smoke: pair), smoke=True)
    assert calls == ["ours", "ours", "peer", "peer", *(["ours", "peer"] * 2)]
    assert result.figure.ratio == pytest.approx(result.figure.value / result.figure.peer_value)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([], ["nothing"])
    assert "unknown benchmark 'nothing'" in capsys.readouterr().err
