"""What `shardam demo` shows to people: header, progress, epochs, the moved row, what to do next.

It draws what it is told and starts nothing. On a terminal a bar moves; elsewhere there are plain lines only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shardam_server.demo_rest import RowState
from shardam_server.typed_commands import python_command, shardam_command

SHOWN_ELEMENTS = 6
"""Elements of a row that fit a line of 80 characters."""

QUICKSTART = "examples/quickstart.py"
"""The smallest program, as seen from a checkout's root."""

LISTED_FIELDS = 12
"""More names say less."""


@dataclasses.dataclass(frozen=True)
class DataSummary:
    """The data, as the preparing process described them."""

    title: str
    reason: str
    notes: Sequence[str]
    fields: Sequence[str]
    train_samples: int
    test_samples: int


@dataclasses.dataclass(frozen=True)
class EpochResult:
    """Measurements after an epoch; throughput is the mean so far."""

    epoch: int
    auc: float
    log_loss: float
    samples_per_s: float
    baseline_auc: float
    baseline_log_loss: float
    baseline_samples_per_s: float


@dataclasses.dataclass(frozen=True)
class Training:
    """What the whole run was.

    Args:
        mode: async, sync or bounded:N.
        workers: their number; in sync K, the contributions of a step.
        shards: their number.
        rows: rows of all tables after it.
        batch_size: samples of a step over all workers.
        steps: steps of each worker, and of the baseline.
        table_steps: SparseAdam steps that a table has taken.
    """

    mode: str
    workers: int
    shards: int
    rows: int
    batch_size: int
    steps: int
    table_steps: int

    def step_ms(self, samples_per_s: float) -> float:
        """Returns milliseconds of a step over all workers at a throughput."""
        return 1000 * self.batch_size / samples_per_s

    def meaning(self) -> str:
        """Says in a sentence what the mode meant for the run."""
        steps, updates = f"{self.steps:,} steps", f"{self.table_steps:,} SparseAdam steps"
        if self.mode == "sync":
            return (
                f"Mode sync: the group took {steps}, each the mean of K = {_count(self.workers, 'contribution')} and one "
                f"SparseAdam step of a table ({self.table_steps:,}), as in one process with the whole batch."
            )
        if self.mode == "async":
            return (
                f"Mode async: pushes are applied on arrival; a table took {updates}, one for each push of "
                f"{_count(self.workers, 'worker')} with {steps}, the baseline {self.steps:,}."
            )
        bound = self.mode.partition(":")[2]
        return (
            f"Mode {self.mode}: as async, a table took {updates}, one for each push; a worker that was more than {bound} "
            f"{'step' if bound == '1' else 'steps'} ahead of another waited with its next pull."
        )


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Where the time of a worker's steps went.

    Args:
        steps: how many.
        total_s: seconds by phase, in the order in which a step meets them.
    """

    steps: int
    total_s: Mapping[str, float]

    def lines(self) -> Iterator[str]:
        """Yields the phases, two a line."""
        cells = [f"{phase:10}{1000 * total_s / self.steps:8.2f} ms" for phase, total_s in self.total_s.items()]
        for first in range(0, len(cells), 2):
            yield "  " + "     ".join(cells[first : first + 2])


@dataclasses.dataclass(frozen=True)
class MovedRow:
    """A row before training (its weight), and as REST shows it after."""

    table: str
    row_id: str
    title: str
    samples: int
    before: Sequence[float]
    after: RowState
    url: str


class DemoReport:
    """Writes the report to a console; a context manager, so that a terminal is left in order."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._description = ""
        self._head_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop_progress()

    def line(self, text: str = "", style: str | None = None) -> None:
        """Prints one line, unbroken however narrow the terminal."""
        self._console.print(escape(text), style=style, soft_wrap=True, highlight=False)

    def data(self, data: DataSummary) -> None:
        """Says what is trained on."""
        because = f", because {data.reason}" if data.reason else ""
        self.line(f"shardam demo: {data.title}{because}", style="bold")
        for note in data.notes:
            self.line(f"  {note}")
        self.line(
            f"  {data.train_samples:,} training and {data.test_samples:,} test samples; "
            f"{len(data.fields)} fields, one table each: {_some(data.fields)}"
        )

    def started(self, devices: Sequence[str], workers: int, mode: str, admin_url: str) -> None:
        """Says what runs where."""
        where = ", ".join(f"{device} x {devices.count(device)}" for device in sorted(set(devices)))
        self.line(
            f"  {_count(len(devices), 'shard')} ({where}) and the admin API are up ({admin_url}); "
            f"starting {_count(workers, 'worker')} (cpu), mode {mode}"
        )

    def durability(self, data_dir: Path | None, checkpoint_root: Path | None) -> None:
        """Says where rows live, if they outlive the demo, and where checkpoints lie."""
        if data_dir is not None:
            self.line(f"  rows are kept in {data_dir}; a demo with this folder again trains on from there")
        if checkpoint_root is not None:
            self.line(f"  checkpoints go to {checkpoint_root}; Ctrl-C while training makes one and says how to go on from it")

    def resumed(self, epoch: int, steps: int) -> None:
        """Says where a run goes on."""
        self.line(f"  goes on from the checkpoint after step {steps:,}, in epoch {epoch}")

    def checkpoint(self, name: str, epoch: int, steps: int) -> None:
        """Says that a checkpoint was made."""
        self.line(f"checkpoint {name} after step {steps:,}, in epoch {epoch}")

    def checkpoint_failed(self, steps: int, message: str) -> None:
        """Says why a checkpoint was not made; training goes on."""
        self.line(f"no checkpoint after step {steps:,}: {message}")

    def stopped(self, command: str) -> None:
        """Says how to go on."""
        self._stop_progress()
        self.line("Go on from here with", style="bold")
        self.line(f"  {command}")

    def progress(self, part: str, epoch: int, done: int, total: int) -> None:
        """Moves the bar, if this is a terminal."""
        if not self._console.is_terminal:
            return
        if self._progress is None or self._task is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("")
        name = "local baseline" if part == "baseline" else part
        description = f"epoch {epoch}, {name:14}"
        if description != self._description:  # another pace, so the time left is estimated anew
            self._progress.reset(self._task, total=total)
            self._description = description
        self._progress.update(self._task, description=description, completed=done)

    def epoch(self, result: EpochResult) -> None:
        """Prints one line of the table of epochs, the first time with its head."""
        if not self._head_shown:
            self._head_shown = True
            self.line()
            self.line("              AUC             log loss            samples/s", style="bold")
            self.line("epoch   shardam   local   shardam   local   shardam     local", style="bold")
        self.line(
            f"{result.epoch:5}   {result.auc:7.4f} {result.baseline_auc:7.4f}   {result.log_loss:7.4f} "
            f"{result.baseline_log_loss:7.4f}   {result.samples_per_s:7,.0f} {result.baseline_samples_per_s:9,.0f}"
        )

    def result(self, last: EpochResult, training: Training) -> None:
        """Prints what the run has shown."""
        self._stop_progress()
        self.line()
        self.line(
            f"AUC {last.auc:.4f}, local baseline {last.baseline_auc:.4f} ({last.auc - last.baseline_auc:+.4f}); "
            f"{training.rows:,} rows on {_count(training.shards, 'shard')}.",
            style="bold",
        )
        self.line(
            f"{last.samples_per_s:,.0f} samples/s with {_count(training.workers, 'worker')} and "
            f"{_count(training.shards, 'shard')}; "
            f"{last.baseline_samples_per_s:,.0f} with one local process of one thread, which has all rows in its own memory."
        )
        self.line(
            f"{training.step_ms(last.samples_per_s):.1f} ms a step of {training.batch_size} samples; "
            f"{training.step_ms(last.baseline_samples_per_s):.1f} ms locally."
        )
        self.line(training.meaning())

    def times(self, times: StepTimes) -> None:
        """Prints where a step's time went."""
        self.line()
        self.line("Where the time of a step went, on rank 0 (phases overlap, some run beside training):", style="bold")
        for line in times.lines():
            self.line(line)

    def moved(self, row: MovedRow) -> None:
        """Prints a row before and after training, with its moments."""
        title = f" ({row.title})" if row.title else ""
        self.line()
        self.line(
            f"Row {row.row_id} of table {row.table}{title}, in {row.samples:,} training samples, read back by", style="bold"
        )
        self.line(f"  GET {row.url}")
        for name, values in (
            ("weight before", row.before),
            ("weight now", row.after.weight),
            ("exp_avg", row.after.exp_avg),
            ("exp_avg_sq", row.after.exp_avg_sq),
        ):
            shown = " ".join(f"{value: .2e}" if name == "exp_avg_sq" else f"{value: .5f}" for value in values[:SHOWN_ELEMENTS])
            self.line(f"  {name:14}{shown} {'...' if len(values) > SHOWN_ELEMENTS else ''}".rstrip())
        self.line(f"  step           {row.after.step:,} (updates of the table so far)")

    def next_steps(self) -> None:
        """Says how to go on after a demo that ends."""
        self.line()
        self.line(f"Next: `{shardam_command()} demo --keep` leaves all up to look at.")
        if Path(QUICKSTART).is_file():
            self.line(f"      `{python_command()} {QUICKSTART}` is the smallest program.")

    def kept(self, admin_url: str, redis_url: str, row_url: str) -> None:
        """Prints what can be opened while everything stays up."""
        self.line()
        self.line("Everything stays up until Ctrl-C:", style="bold")
        self.line(f"  page       {admin_url}/")
        self.line(f"  API        {admin_url}/docs")
        self.line(f"  this row   curl --noproxy '*' {row_url}")
        self.line(f"  connect    export SHARDAM_REDIS_URL={redis_url}")

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._task = None


def _some(names: Sequence[str]) -> str:
    """Lists names, of many only the first and the last."""
    return ", ".join(names) if len(names) <= LISTED_FIELDS else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
