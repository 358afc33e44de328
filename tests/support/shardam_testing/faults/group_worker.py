"""A member of a group without torch: pull, gradients that depend on the pulled rows, push; every end is noted in a file.

Usage: python -m shardam_testing.faults.group_worker --url URL --seed N --rank R --world-size K --last-step N --progress FILE

Lines of the progress file are JSON objects (members.py reads them). A killed member loses no line that it has written; at
SIGTERM it leaves after the present step.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

import shardam
from shardam._contributions import Contribution
from shardam._push_checks import merged_gradient
from shardam._reads import read_weights
from shardam._steps import step_change
from shardam.errors import NotAMember, ShardamError
from shardam_testing.faults.group_work import Work, digest, make_work
from shardam_testing.faults.oracle_groups import ENDS
from shardam_testing.faults.sequence import TABLES, Float32s
from shardam_testing.faults.worker import Progress
from shardam_testing.faults.workers import FAILED

EXPECTED_REFUSAL = "NON_FINITE_GRADIENT"
"""What steps with sums that are too large end with, on all ranks; the member goes on with the next step."""


class GroupTrainer:
    """Makes the steps of one member.

    Args:
        cluster: its client.
        arguments: of the process.
        progress: the file of what happened.
    """

    def __init__(self, cluster: shardam.Cluster, arguments: argparse.Namespace, progress: Progress) -> None:
        self._cluster = cluster
        self._arguments = arguments
        self._progress = progress
        self._tables = {table.name: table for table in cluster.create_tables(list(TABLES))}

    def note_client(self) -> None:
        """Notes which client this is, and where it begins."""
        self._progress.note(client=self._cluster._session.client_id.hex(), first_step=self.next_step)

    @property
    def next_step(self) -> int:
        """The step that this member takes part in next."""
        step = self._cluster.group_step
        assert step is not None, "the cluster is in no group"
        return step

    def step(self) -> None:
        """Makes one step."""
        step = self.next_step
        place = self._arguments.skip + step
        work = make_work(self._arguments.seed, self._arguments.world_size, self._arguments.rank, place)
        wanted = [(self._tables[part.spec.name].info(), part.row_ids) for part in work.tables]
        pulled = read_weights(self._cluster._ready_to_read(training=True), wanted, training=True)
        self._progress.note(pulled=digest(pulled), step=step, at=time.monotonic())
        self._progress.note(sent=step, at=time.monotonic())
        end, counted = self._contribute(work, pulled)
        self._progress.note(ended=end, step=step, counted=counted, at=time.monotonic())

    def _contribute(self, work: Work, pulled: list[Float32s]) -> tuple[str, int]:
        """Sends this member's part of a step, as SparseAdam.step does, and waits for the step's end."""
        gradients = [
            merged_gradient(
                self._tables[part.spec.name].info(),
                part.row_ids,
                part.gradients(rows, work.grad_scale),
                work.options,
                work.grad_scale,
            )
            for part, rows in zip(work.tables, pulled, strict=True)
        ]
        session, pusher = self._cluster._ready_to_write()
        change = step_change(session, gradients if work.kind == "gradient" else [], work.kind)
        assert change is not None, "a member sends something in every step"
        try:
            pusher.run(change)
        except ShardamError as error:
            if error.reason != EXPECTED_REFUSAL:
                raise
            return "refused", 0
        if not isinstance(change, Contribution) or change.result is None:
            return "applied", 0
        return ENDS[change.result.end], change.result.num_contributions


def train(trainer: GroupTrainer, arguments: argparse.Namespace, progress: Progress, stop: threading.Event) -> int:
    """Makes steps until the last one, or until it is told to stop; returns the last one."""
    trainer.note_client()
    while not stop.wait(arguments.pace_s) and trainer.next_step <= arguments.last_step:
        try:
            trainer.step()
        except NotAMember as error:
            progress.note(dropped=error.reason, message=error.message)
            trainer._cluster.rejoin()
            trainer.note_client()
    return trainer.next_step - 1


def main() -> int:
    """Runs a member; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--cluster", default="test")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--group", default="workers")
    parser.add_argument("--reduce", default="mean")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--last-step", type=int, required=True)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--skip", type=int, default=0, help="steps of the run that an earlier group has made")
    parser.add_argument("--shard-timeout-s", type=float, default=120.0)
    arguments = parser.parse_args()
    progress, stop = Progress(arguments.progress), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        with shardam.connect(
            arguments.url,
            cluster=arguments.cluster,
            mode=arguments.mode,
            group=arguments.group,
            rank=arguments.rank,
            world_size=arguments.world_size,
            reduce=arguments.reduce,
            shard_timeout_s=arguments.shard_timeout_s,
        ) as cluster:
            last = train(GroupTrainer(cluster, arguments, progress), arguments, progress, stop)
    except ShardamError as error:
        progress.note(error=type(error).__name__, reason=error.reason, message=error.message)
        return FAILED
    progress.note(done=last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
