"""One run of the demo: data, cluster, workers, the row at the end; and their stop, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from shardam_server.command_errors import CommandError, UsageError
from shardam_server.demo_checkpoints import CheckpointOptions, Stopped, resume_command
from shardam_server.demo_processes import Child, Exited, Happening, Line, child_environment
from shardam_server.demo_report import DataSummary, DemoReport, EpochResult, MovedRow, StepTimes, Training
from shardam_server.demo_rest import devices_of, read_row, row_url

PREPARE, CLUSTER, WORKERS = "data preparation", "cluster", "workers"
"""The child processes, as messages call them; the workers' is torchrun."""

CLUSTER_START_S = 120.0
"""A cluster starts in seconds; one that takes this long hangs."""

STOP = b"s"
"""What is written to the workers' stdin to have them stop after a step; shardam.demo reads it."""

WORKERS_STOP_S = 5.0
CLUSTER_STOP_S = 30.0
"""Workers end at once; shards drain first."""

ERROR_LINES = 25
"""Last lines of a failed process that are shown."""

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""The workers' dense gradients travel on this machine only."""


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the user asked for; `data_dir` None: rows live in memory only; `mode` as shardam.connect takes it."""

    data: str | None
    workers: int
    shards: int
    epochs: int
    seed: int
    mode: str
    data_dir: Path | None
    keep: bool
    as_json: bool
    checkpoints: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)

    def flags(self) -> list[str]:
        """Returns the flags that a run must have again to go on from a checkpoint of this one, and those that it may want."""
        words = [] if self.data is None else ["--data", self.data]
        words += ["--workers", str(self.workers), "--shards", str(self.shards), "--epochs", str(self.epochs)]
        words += ["--seed", str(self.seed), "--mode", self.mode]
        return words + ([] if self.checkpoints.every == 0 else ["--checkpoint-every", str(self.checkpoints.every)])


@dataclasses.dataclass(frozen=True)
class ClusterAddress:
    """The running cluster, as `shardam up --json` describes it."""

    redis_url: str
    name: str
    admin_url: str


@dataclasses.dataclass(frozen=True)
class RowToShow:
    """The row that is shown at the end, as the workers found it before training."""

    table: str
    row_id: str
    title: str
    samples: int
    before: list[float]


@dataclasses.dataclass(frozen=True)
class WorkerError:
    """Why a worker has ended; with a trace if the error was none of shardam's own."""

    message: str
    trace: list[str]


class Demo:
    """One run.

    Args:
        options: what the user asked for.
        folder: for the prepared data and the workers' temporary files; removed by the caller.
        report: what people see.

    Attributes:
        finished: everything was shown; what follows is only the wait of `--keep`.
    """

    def __init__(self, options: DemoOptions, folder: Path, report: DemoReport) -> None:
        self.finished = False
        self._options = options
        self._dataset = folder / "clicks.npz"
        self._report = report
        self._happenings: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self._to_show: RowToShow | None = None
        self._last_epoch: EpochResult | None = None
        self._times: StepTimes | None = None
        self._training: Training | None = None
        self._errors: list[WorkerError] = []
        self._has_stopped = False
        self._checkpoint_root = options.checkpoints.root(options.data_dir)

    def run(self) -> None:
        """Does it all and stops what it started; a second signal while it stops ends the children by force.

        Raises:
            UsageError: the data are wrong.
            CommandError: a process has failed.
        """
        try:
            self._prepare()
            cluster = self._start_cluster()
            self._train(cluster)
            self._show(cluster)
            self.finished = True
            if self._options.keep:
                self._wait_for_signal()
        finally:
            self._stop()

    def _start(self, name: str, module: str, arguments: list[str], extra: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._children[name] = Child(name, command, child_environment(extra), self._happenings)

    def _prepare(self) -> None:
        data = [] if self._options.data is None else ["--data", self._options.data]
        seed = ["--seed", str(self._options.seed)]
        self._start(PREPARE, "shardam.demo.prepare", [*data, *seed, "--out", str(self._dataset)], {})
        while True:
            match self._happenings.get():
                case Line(text=text):
                    self._take_data_event(json.loads(text))
                case Exited(status=0):
                    del self._children[PREPARE]
                    return
                case Exited(status=status):
                    self._fail(PREPARE, status)

    def _take_data_event(self, event: dict[str, Any]) -> None:
        if event.pop("event") == "error":
            raise UsageError(event["message"])
        self._report.data(DataSummary(**event))

    def _start_cluster(self) -> ClusterAddress:
        flags = ["--shards", str(self._options.shards), "--port", "0", "--admin-port", "0", "--seed", str(self._options.seed)]
        flags.append(f"--data-dir={self._options.data_dir or 'none'}")
        if self._checkpoint_root is not None:
            flags.append(f"--checkpoint-dir={self._checkpoint_root}")
        self._start(CLUSTER, "shardam_server", ["up", *flags, "--json", "--exit-with-stdin"], {})
        try:
            happening = self._happenings.get(timeout=CLUSTER_START_S)
        except queue.Empty:
            tail = "\n  ".join(self._children[CLUSTER].tail()[-ERROR_LINES:])
            raise CommandError(f"the cluster was not up after {CLUSTER_START_S:g} s; its last lines:\n  {tail}") from None
        if isinstance(happening, Exited):
            self._fail(CLUSTER, happening.status)
        banner = json.loads(happening.text)
        return ClusterAddress(banner["redis_url"], banner["cluster"], banner["admin_url"])

    def _train(self, cluster: ClusterAddress) -> None:
        options = self._options
        self._report.started(devices_of(cluster.admin_url), options.workers, options.mode, cluster.admin_url)
        self._report.durability(options.data_dir, self._checkpoint_root)
        torchrun = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(options.workers)]
        environment = {
            "SHARDAM_REDIS_URL": cluster.redis_url,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
            "TMPDIR": str(self._dataset.parent),  # torchrun and torch leave folders behind, which go with this one
        }
        arguments = ["--dataset", str(self._dataset), "--cluster", cluster.name, "--epochs", str(options.epochs)]
        arguments += ["--seed", str(options.seed), "--mode", options.mode, *self._checkpoint_flags()]
        self._start(
            WORKERS,
            "torch.distributed.run",
            [*torchrun, "-m", "shardam.demo", *arguments, "--exit-with-stdin"],
            environment,
        )
        try:
            self._follow_workers()
        except Stopped:
            if self._checkpoint_root is not None and self._to_show is None:
                self._report.line("training had not begun, so this makes no checkpoint")
            elif self._checkpoint_root is not None and WORKERS in self._children:
                self._stop_with_checkpoint()
            raise

    def _checkpoint_flags(self) -> list[str]:
        """Returns what the workers are told of checkpoints."""
        asked = self._options.checkpoints
        flags = [] if self._checkpoint_root is None else ["--checkpoints", "--checkpoint-every", str(asked.every)]
        resumed = asked.resumed()
        return flags if resumed is None else [*flags, "--resume", resumed]

    def _stop_with_checkpoint(self) -> None:
        """Has the workers stop after their step, with a checkpoint; another signal ends it at once.

        Raises:
            CommandError: a process has failed meanwhile.
        """
        self._report.line("stops after this step, with a checkpoint; Ctrl-C again stops at once")
        self._children[WORKERS].tell(STOP)
        self._follow_workers()

    def _follow_workers(self) -> None:
        """Takes what the workers say until they have ended.

        Raises:
            CommandError: a process has failed.
        """
        while True:
            match self._happenings.get():
                case Line(child=child, text=text) if child == WORKERS and text.startswith('{"event": '):
                    self._take_worker_event(json.loads(text))
                case Line(child=child, text=text):
                    self._children[child].add_to_tail(text)
                case Exited(child=child, status=0) if child == WORKERS and (self._training is not None or self._has_stopped):
                    return
                case Exited(child=child, status=status):
                    self._fail(child, status)

    def _take_worker_event(self, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case "progress":
                self._report.progress(**event)
            case "epoch":
                self._last_epoch = EpochResult(**event)
                self._report.epoch(self._last_epoch)
            case "moved":
                self._to_show = RowToShow(**event)
            case "resumed":
                self._report.resumed(**event)
            case "checkpoint":
                self._report.checkpoint(**event)
            case "checkpoint_failed":
                self._report.checkpoint_failed(**event)
            case "stopped":
                self._take_stop(event["name"])
            case "timings":
                self._times = StepTimes(**event)
            case "end":
                options = self._options
                self._training = Training(options.mode, options.workers, options.shards, **event)
            case "error":
                # A worker that fails takes others with it; theirs are follow-up errors of the process group.
                self._errors.insert(len(self._errors) if event["trace"] else 0, WorkerError(**event))

    def _take_stop(self, name: str | None) -> None:
        self._has_stopped = True
        if name is None or self._checkpoint_root is None:
            self._report.line("stopped without a checkpoint; the line above says why")
        else:
            self._report.stopped(resume_command(self._options.flags(), self._checkpoint_root, name))

    def _show(self, cluster: ClusterAddress) -> None:
        if self._to_show is None or self._last_epoch is None or self._training is None:
            raise CommandError("the workers ended without a result; this is a defect of the demo")
        options, last, shown, training = self._options, self._last_epoch, self._to_show, self._training
        url = row_url(cluster.admin_url, shown.table, shown.row_id)
        row = read_row(url)
        self._report.result(last, training)
        if self._times is not None and self._times.steps:
            self._report.times(self._times)
        self._report.moved(MovedRow(shown.table, shown.row_id, shown.title, shown.samples, shown.before, row, url))
        if options.keep:
            self._report.kept(cluster.admin_url, cluster.redis_url, url)
        else:
            self._report.next_steps()
        if options.as_json:
            figures = dataclasses.asdict(last)
            del figures["epoch"]
            times = {
                "step_ms": training.step_ms(last.samples_per_s),
                "baseline_step_ms": training.step_ms(last.baseline_samples_per_s),
            }
            sys.stdout.write(json.dumps(figures | times | dataclasses.asdict(training)) + "\n")
            sys.stdout.flush()

    def _wait_for_signal(self) -> NoReturn:
        """Waits with everything up; a signal's exception ends it."""
        while True:
            match self._happenings.get():
                case Exited(child=child, status=status) if child == CLUSTER:
                    self.finished = False
                    self._fail(child, status)

    def _fail(self, name: str, status: int) -> NoReturn:
        """Raises the error of a child that has ended too early: what a worker said, else its last lines."""
        said = self._errors[0] if self._errors and name == WORKERS else None
        lines = [f"demo: {said.message if said else f'the {name} ended with exit status {status}'}"]
        if said:
            lines += said.trace[-ERROR_LINES:]
        for child in self._children.values():
            tail = [line for line in child.tail() if not (child.name == CLUSTER and " INFO " in line)]
            clear = said is not None and not said.trace
            if tail and not (child.name == WORKERS and clear):  # beside shardam's own words torchrun's are noise
                lines += [f"last lines of the {child.name}:", *tail[-ERROR_LINES:]]
        raise CommandError("\n  ".join(lines))

    def _stop(self) -> None:
        try:
            for name, grace_s in ((PREPARE, WORKERS_STOP_S), (WORKERS, WORKERS_STOP_S), (CLUSTER, CLUSTER_STOP_S)):
                if name in self._children:
                    self._children[name].stop(grace_s)
        except BaseException:
            for child in self._children.values():
                child.kill()
            raise
