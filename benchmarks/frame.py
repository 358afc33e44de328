"""The frame of all benchmarks: interleaved rounds, ratio of medians, one JSON line a figure, and a verdict.

A figure is a rate of ours beside the rate of a peer that does the same work in the same run. `--check` compares the ratio with
the goal; a control memcpy between the rounds tells whether the machine was quiet enough to say anything. `--runs 3` measures in
three processes, one after the other, and prints of each figure the run whose ratio is the median.

Imports NumPy only, so that it runs where the package is not installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

SMOKE_ROUNDS = 2
ROUNDS = 15

TOLERANCE = 0.85
"""A check passes from this share of its goal on: a ratio moves that much between machines."""

MAX_CONTROL_SPREAD = 0.10
"""If the control's time varies by more, the machine is too noisy for a verdict."""

EXIT_MET, EXIT_MISSED, EXIT_NOISY = 0, 1, 3

_CONTROL_BYTES = 1 << 26  # beyond the caches


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of output.

    Attributes:
        name: of the benchmark.
        value: our rate, in `unit`.
        unit: of both rates.
        peer: what the peer is.
        peer_value: its rate.
        ratio: value / peer_value, of medians.
        goal: what the ratio should reach.
        spread: (90th - 10th percentile) / median of the ratios of the rounds.
        details: what else was found, by name; None: nothing else.
    """

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float
    goal: float
    spread: float
    details: Mapping[str, object] | None = None

    def json_line(self) -> str:
        """Returns the figure as one line of JSON; details only if there are some."""
        rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in vars(self).items()}
        return json.dumps({key: value for key, value in rounded.items() if value is not None})

    def text_line(self) -> str:
        """Returns the figure as people read it."""
        return (
            f"{self.name:<28} {self.value:>10.4g} {self.unit:<12} {self.ratio:6.2f} x {self.peer} ({self.peer_value:.4g})"
            f"  goal {self.goal:.3g}  spread {self.spread:.0%}"
        )

    def detail_lines(self) -> list[str]:
        """Returns the details as people read them."""
        return [f"{'':<28} {name}: {value}" for name, value in (self.details or {}).items()]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two ways to do the same work.

    Attributes:
        work: in the benchmark's unit, of one call of either.
        ours: does it our way.
        peer: does it the peer's way.
        calls: of a round. Above 1 each call is timed, and the round's time is their median: a latency, not a throughput.
    """

    work: float
    ours: Callable[[], object]
    peer: Callable[[], object]
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A figure to be measured.

    Attributes:
        name: on the command line and in the output.
        unit: of work per second.
        peer: what the peer is.
        goal: what the ratio should reach.
        make: builds the pair; its argument is True for the small sizes of a smoke run.
    """

    name: str
    unit: str
    peer: str
    goal: float
    make: Callable[[bool], Pair]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A figure and how much the control varied beside it."""

    figure: Figure
    control_spread: float


def spread_of(values: Sequence[float]) -> float:
    """Returns (90th - 10th percentile) / median."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return float((high - low) / middle)


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(benchmark: Benchmark, *, smoke: bool, num_rounds: int | None = None) -> Measured:
    """Runs a benchmark: a warm-up of both, then rounds of control, ours, control, peer: neither finds the other's caches."""
    pair = benchmark.make(smoke)
    source = np.ones(_CONTROL_BYTES // (64 if smoke else 1), np.uint8)
    target = np.empty_like(source)

    def control() -> None:
        np.copyto(target, source)

    for work in (control, pair.ours, pair.peer):
        work()
        work()

    def seconds(work: Callable[[], object]) -> float:
        return statistics.median(seconds_of(work) for _ in range(1 if work is control else pair.calls))

    rounds = range(num_rounds or (SMOKE_ROUNDS if smoke else ROUNDS))
    times = [[seconds(work) for work in (control, pair.ours, control, pair.peer)] for _ in rounds]
    before_ours, ours, before_peers, peers = zip(*times, strict=True)
    controls = [*before_ours, *before_peers]
    value, peer_value = pair.work / statistics.median(ours), pair.work / statistics.median(peers)
    figure = Figure(
        name=benchmark.name,
        value=value,
        unit=benchmark.unit,
        peer=benchmark.peer,
        peer_value=peer_value,
        ratio=value / peer_value,
        goal=benchmark.goal,
        spread=spread_of([peer / our for our, peer in zip(ours, peers, strict=True)]),
    )
    return Measured(figure, spread_of(controls))


def verdict(measured: Sequence[Measured]) -> int:
    """Returns the exit status of a check: missed only where the machine was quiet."""
    missed = [each for each in measured if each.figure.ratio < TOLERANCE * each.figure.goal]
    if not missed:
        return EXIT_MET
    noisy = [each for each in missed if each.control_spread > MAX_CONTROL_SPREAD]
    return EXIT_NOISY if noisy else EXIT_MISSED


def parser_of(names: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the command line that benchmarks of these names share."""
    parser = argparse.ArgumentParser(description="exit status with --check: 0 goals met, 1 missed, 3 machine too noisy")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default all")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--smoke", action="store_true", help="small sizes and few rounds: the keys are right, the figures are not"
    )
    parser.add_argument("--check", action="store_true", help="compare with the goals")
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help=f"rounds of each figure; default {ROUNDS}")
    parser.add_argument(
        "--runs", type=int, default=1, metavar="N", help="separate runs; of each figure the median one is printed; default 1"
    )
    return parser


def show(figure: Figure, *, as_json: bool) -> None:
    """Prints a figure."""
    print(figure.json_line() if as_json else "\n".join([figure.text_line(), *figure.detail_lines()]), flush=True)


def say_verdict(status: int, because: str) -> int:
    """Says on stderr how a check has ended; returns its exit status."""
    word = {EXIT_MET: "goals met", EXIT_MISSED: "a goal is missed", EXIT_NOISY: "too noisy to say"}[status]
    print(f"{word}; {because}", file=sys.stderr)
    return status


def judge(measured: Sequence[Measured]) -> int:
    """Says how the check of one run has ended; returns its exit status."""
    widest = max(each.control_spread for each in measured)
    return say_verdict(verdict(measured), f"the control memcpy varied by {widest:.0%}")


def repeat(options: argparse.Namespace) -> int:
    """Runs this script as it was called in as many processes as --runs says and prints the median run of each figure.

    Returns:
        As main; too noisy to say if a goal is missed and one of the runs was too noisy.
    """
    command = [sys.executable, *sys.argv, "--runs", "1", "--json", "--check"]  # the last --runs counts
    found: dict[str, list[Figure]] = {}
    noisy = False
    for _ in range(options.runs):
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if result.returncode not in (EXIT_MET, EXIT_MISSED, EXIT_NOISY):
            raise RuntimeError(f"a run ended with status {result.returncode}; its message stands above")
        noisy = noisy or result.returncode == EXIT_NOISY
        for line in result.stdout.splitlines():
            figure = Figure(**json.loads(line))
            found.setdefault(figure.name, []).append(figure)
    medians = [sorted(figures, key=lambda figure: figure.ratio)[(len(figures) - 1) // 2] for figures in found.values()]
    for median in medians:
        show(median, as_json=options.json)
        if not options.json:
            ratios = ", ".join(f"{figure.ratio:.2f}" for figure in found[median.name])
            print(f"{'':<28} ratios of the runs: {ratios}", flush=True)
    if not options.check:
        return EXIT_MET
    missed = any(figure.ratio < TOLERANCE * figure.goal for figure in medians)
    status = (EXIT_NOISY if noisy else EXIT_MISSED) if missed else EXIT_MET
    return say_verdict(status, f"medians of {options.runs} runs")


def run(benchmarks: Sequence[Benchmark], options: argparse.Namespace) -> int:
    """Runs the benchmarks that parsed options name and prints a line for each; returns as main."""
    known = {each.name: each for each in benchmarks}
    measured = []
    for name in options.names or known:
        measured.append(measure(known[name], smoke=options.smoke, num_rounds=options.rounds))
        show(measured[-1].figure, as_json=options.json)
    return judge(measured) if options.check else EXIT_MET


def parse(parser: argparse.ArgumentParser, names: Sequence[str], arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line and refuses names that are not among these."""
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in names:
            parser.error(f"unknown benchmark {name!r}")
    for flag, value in (("--rounds", options.rounds), ("--runs", options.runs)):
        if value is not None and value < 1:
            parser.error(f"{flag} must be at least 1, got {value}")
    return options


def main(benchmarks: Sequence[Benchmark], arguments: Sequence[str]) -> int:
    """Runs the benchmarks that the command line names and prints a line for each.

    Returns:
        0; with --check 1 if a goal is missed and 3 if the machine was too noisy to say.
    """
    names = [each.name for each in benchmarks]
    options = parse(parser_of(names), names, arguments)
    return repeat(options) if options.runs > 1 else run(benchmarks, options)
