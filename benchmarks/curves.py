"""Cost per row along an axis: the same work at several points, in interleaved rounds, and the exponent that fits."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from frame import ROUNDS, SMOKE_ROUNDS, Figure, Measured, seconds_of, spread_of

NS_PER_S = 1e9

CONTROL_BYTES, SMOKE_CONTROL_BYTES = 1 << 26, 1 << 20
"""Of the memcpy that tells whether the machine is quiet: beyond the caches."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A place on the axis.

    Attributes:
        at: how many of what the axis counts.
        rows: that one call of work moves.
        work: does it.
        kernel_s: seconds of work that the shards' kernels took since it was asked last; None: nobody knows.
    """

    at: int
    rows: int
    work: Callable[[], object]
    kernel_s: Callable[[], float | None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Curve:
    """Work along an axis.

    Attributes:
        name: of the figure.
        axis: what it counts.
        goal: what the rate at the last point should reach of the rate at the first.
        make: builds the points, by ascending `at`; its argument is True for the small sizes of a smoke run.
        most: the goal's last point, if there may be points beyond it, which are details alone; None: the last of all.
    """

    name: str
    axis: str
    goal: float
    make: Callable[[bool], Sequence[Point]]
    most: int | None = None


def exponent(at: Sequence[int], costs: Sequence[float]) -> float:
    """Returns the slope of the costs in a plot of both logarithms: 0 is a cost that does not depend on the axis."""
    slope, _ = np.polyfit(np.log(at), np.log(costs), 1)
    return float(slope)


def measure_curve(curve: Curve, *, smoke: bool, num_rounds: int | None) -> Measured:
    """Measures all points in turn, after a round that does not count."""
    points = curve.make(smoke)
    source = np.ones(SMOKE_CONTROL_BYTES if smoke else CONTROL_BYTES, np.uint8)
    target = np.empty_like(source)
    for point in points:
        point.work()
        point.kernel_s()
    controls: list[float] = []
    costs: list[list[float]] = [[] for _ in points]
    kernels: list[list[float]] = [[] for _ in points]
    for _ in range(num_rounds or (SMOKE_ROUNDS if smoke else ROUNDS)):
        controls.append(seconds_of(lambda: np.copyto(target, source)))
        for index, point in enumerate(points):
            costs[index].append(seconds_of(point.work) / point.rows)
            kernel_s = point.kernel_s()
            if kernel_s is not None:
                kernels[index].append(kernel_s / point.rows)
    found = [statistics.median(each) for each in costs]
    at = [point.at for point in points]
    details: dict[str, object] = {
        "exponent": round(exponent(at, found), 3),
        "ns_per_row": _by_point(at, found),
    }
    if all(kernels):
        kernel_costs = [statistics.median(each) for each in kernels]
        details |= {"kernel_exponent": round(exponent(at, kernel_costs), 3), "kernel_ns_per_row": _by_point(at, kernel_costs)}
    last = max(index for index, place in enumerate(at) if curve.most is None or place <= curve.most)
    figure = Figure(
        name=curve.name,
        value=1 / found[last],
        unit="rows/s",
        peer=f"{at[0]:,} {curve.axis} (here {at[last]:,})",
        peer_value=1 / found[0],
        ratio=found[0] / found[last],
        goal=curve.goal,
        spread=spread_of([few / many for few, many in zip(costs[0], costs[last], strict=True)]),
        details=details,
    )
    return Measured(figure, spread_of(controls))


def _by_point(at: Sequence[int], seconds: Sequence[float]) -> dict[str, float]:
    return {str(place): float(f"{NS_PER_S * cost:.4g}") for place, cost in zip(at, seconds, strict=True)}
