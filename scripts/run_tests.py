"""Runs the tests in stages, each with the settings it needs, and prints seconds and counts per stage; run by `make test`.

Usage: python scripts/run_tests.py [STAGE ...]   (no names: all stages, in order)

Exit status: 0 if every stage passed, 1 otherwise, 2 for an unknown stage.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent

HANG_FACTOR = 4
"""A stage that takes this many times its ceiling hangs and is ended: a busy machine is slow, but not that slow."""

PARALLEL = ("-n", "2", "--dist", "loadfile")
"""A file's tests share clusters and tables, so a file stays on one worker."""


MARK_NAME = "TEST_RUN_MARK"
"""Environment name that every process of a stage inherits, so that what tests leave behind is found."""

EXIT_TIME_S = 15.0
"""Time that processes whose parent is gone have to notice and drain."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pytest run.

    Attributes:
        name: as on the command line.
        ceiling_s: seconds it should take on 2 idle cores; printed beside what it took.
        folder: where its tests lie, below tests/.
        options: pytest options.
        pattern: names of its files.
        exclude: names of files that another stage of the same folder has.
    """

    name: str
    ceiling_s: int
    folder: str
    options: tuple[str, ...] = ()
    pattern: str = "test_*.py"
    exclude: tuple[str, ...] = ()

    def files(self) -> list[str]:
        """Returns the stage's test files."""
        root = ROOT / "tests" / self.folder
        others = {path for pattern in self.exclude for path in root.rglob(pattern)}
        return sorted(str(path) for path in set(root.rglob(self.pattern)) - others)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a stage did.

    Attributes:
        stage: the stage.
        seconds: wall time.
        exit_code: pytest's, or -1 if the stage was ended because it hung.
        passed, failed, skipped: number of tests; errors count as failed.
        left: command lines of processes that tests left behind.
    """

    stage: Stage
    seconds: float
    exit_code: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    left: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether tests ran, none failed and no process stayed; pytest's exit code for "no tests" is a failure, too."""
        return self.exit_code == 0 and self.passed > 0 and not self.left


STAGES = (
    Stage("unit", 60, "unit", PARALLEL, exclude=("client/test_*.py",)),
    Stage("client", 60, "unit/client", PARALLEL),
    Stage("parity", 90, "parity", PARALLEL),
    Stage("triton", 200, "triton", ("-n", "2")),  # each worker keeps an interpreter of its own
    Stage(
        "integration",
        150,
        "integration",
        PARALLEL,
        exclude=("test_rest_*.py", "test_client_[fw]*.py"),
    ),
    Stage("forks", 90, "integration", PARALLEL, pattern="test_client_[fw]*.py"),
    Stage("groups", 60, "groups", PARALLEL),
    Stage("transport", 120, "transport", PARALLEL),
    Stage("rest", 120, "integration", PARALLEL, pattern="test_rest_*.py"),
    Stage("checkpoints", 150, "checkpoints", PARALLEL, exclude=("test_state_*.py",)),
    Stage("restores", 150, "checkpoints", PARALLEL, pattern="test_state_*.py"),
    Stage("demo", 150, "demo", PARALLEL),
    Stage("deploy", 120, "deploy"),  # serial: a whole stack of processes at a time
    Stage("durability", 180, "durability"),  # serial: its threads and small disks should not wait for another file's
    # Two files at a time though they kill processes and see who notices: these wait more than they compute, and no deadline is
    # shorter than ten times what it takes.
    Stage(
        "fault",
        150,
        "fault",
        PARALLEL,
        exclude=("test_exactly_once*.py", "test_group_*.py", "test_up_*.py", "test_checkpoint_*.py"),
    ),
    Stage("checkpoint-faults", 150, "fault", PARALLEL, pattern="test_checkpoint_*.py"),
    Stage("group-faults", 150, "fault", PARALLEL, pattern="test_group_*.py"),
    Stage("up-faults", 90, "fault", PARALLEL, pattern="test_up_*.py"),
    Stage("exactly-once", 120, "fault", PARALLEL, pattern="test_exactly_once*.py"),
    Stage("browser", 90, "browser"),  # serial: one browser at a time is all that two cores carry
)


def run_stage(stage: Stage, files: Sequence[str], report_path: Path) -> Outcome:
    """Runs a stage with its output going to this process's."""
    command = [sys.executable, "-m", "pytest", f"--junitxml={report_path}", *stage.options, *files]
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK_NAME: mark}
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environment)
    try:
        exit_code = process.wait(timeout=HANG_FACTOR * stage.ceiling_s)
    except subprocess.TimeoutExpired:
        exit_code = -1
        print(f"{stage.name}: ended after {HANG_FACTOR} times its ceiling of {stage.ceiling_s} s", file=sys.stderr)
    finally:
        end(process)
        left = end_leftovers(mark)
    passed, failed, skipped = read_counts(report_path)
    return Outcome(stage, time.monotonic() - start, exit_code, passed, failed, skipped, left)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Returns the running processes that carry the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK_NAME) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found


def end_leftovers(mark: str) -> tuple[str, ...]:
    """Kills processes that outlive their stage and returns their command lines."""
    deadline = time.monotonic() + EXIT_TIME_S
    while (processes := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = []
    for process in processes:
        try:
            names.append(" ".join(process.cmdline()))
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return tuple(names)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts pytest, so that fixtures clean up, and kills it if that takes too long."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_counts(report_path: Path) -> tuple[int, int, int]:
    """Returns passed, failed and skipped tests of a JUnit report; zeros if pytest wrote none."""
    if not report_path.exists():
        return 0, 0, 0
    passed = failed = skipped = 0
    for suite in ElementTree.parse(report_path).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        left_out = int(suite.get("skipped", 0))
        failed += bad
        skipped += left_out
        passed += int(suite.get("tests", 0)) - bad - left_out
    return passed, failed, skipped


def summarise(outcomes: Sequence[Outcome]) -> None:
    """Prints one line per stage and the sum."""
    print(f"\n{'stage':<12} {'seconds':>8} {'ceiling':>8} {'passed':>7} {'failed':>7} {'skipped':>8}")
    for outcome in outcomes:
        note = "" if outcome.good else f"  FAILED (pytest exit {outcome.exit_code})"
        if outcome.seconds > outcome.stage.ceiling_s:
            note += "  over its ceiling"
        note += "".join(f"\n{'':<12} left behind: {command}" for command in outcome.left)
        counts = f"{outcome.passed:>7} {outcome.failed:>7} {outcome.skipped:>8}"
        print(f"{outcome.stage.name:<12} {outcome.seconds:>8.1f} {outcome.stage.ceiling_s:>8} {counts}{note}")
    seconds = sum(outcome.seconds for outcome in outcomes)
    totals = [sum(getattr(outcome, key) for outcome in outcomes) for key in ("passed", "failed", "skipped")]
    print(f"{seconds:.0f} s in all")
    print("tests: {} passed, {} failed, {} skipped".format(*totals), flush=True)


def main(names: Sequence[str]) -> int:
    """Runs the named stages, or all."""
    known = {stage.name: stage for stage in STAGES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown stage {unknown[0]!r}; stages are {', '.join(known)}", file=sys.stderr)
        return 2
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="shardam-tests-") as folder:
        for stage in [known[name] for name in names] or STAGES:
            files = stage.files()
            print(f"\n== {stage.name}", flush=True)
            report_path = Path(folder) / f"{stage.name}.xml"
            # pytest without files would run everything, so a stage without any is settled here.
            nothing = Outcome(stage, 0.0, pytest.ExitCode.NO_TESTS_COLLECTED)
            outcomes.append(run_stage(stage, files, report_path) if files else nothing)
    summarise(outcomes)
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
