"""Rounds of kills in checkpoints and restores: a cluster, a worker, a kill in a chosen phase of a job, the comparison after it.

After each kill no shard is held, training goes on, `latest` is complete, and every complete checkpoint is what its shards'
journals give. After a kill in a restore the state is all the checkpoint's, or all as it was; once it is decided, the former.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import shard_pb2
from shardam_testing.faults.checkpoint_files import read_checkpoint
from shardam_testing.faults.checkpoint_kills import (
    ALL_KILLS,
    CHECKPOINT_PHASES,
    NUM_SHARDS,
    JobKill,
    JobPhase,
    kill_in_job,
)
from shardam_testing.faults.checkpoint_verification import compare_checkpoints
from shardam_testing.faults.cluster import READY_TIMEOUT_S, FaultCluster, running_fault_cluster
from shardam_testing.faults.injector import MANY
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.rounds import PACE_S, RoundResult
from shardam_testing.faults.verification import all_rows, run_differences, verify
from shardam_testing.waiting import wait_for

FLAGS = {"journal_limit_mib": "1024", "checkpoint_keep": "2", "hold_s": "2"}
"""Journals without a base, so that each cut can be replayed; checkpoints that are deleted, one of them in each job."""

CHANGES_BETWEEN = 12
"""Changes between two jobs: enough that no two checkpoints are equal."""

NEW_ROWS = 40
"""Rows of a push of new ids."""

DECIDED = (JobPhase.COMMITTED, JobPhase.HALF_ADOPTED, JobPhase.LOADED)
"""From here on a restore is carried out, whoever dies."""


def make_job_kills(seed: int, count: int) -> list[JobKill]:
    """Returns kills, all different as long as there are enough; those of checkpoints first."""
    rng = random.Random(f"checkpoints {seed}")
    kills: list[JobKill] = []
    while len(kills) < count:
        kills += rng.sample(ALL_KILLS, min(len(ALL_KILLS), count - len(kills)))
    return sorted(kills, key=lambda kill: kill.phase not in CHECKPOINT_PHASES)


def run_job_kills(kills: Sequence[JobKill], folder: Path) -> RoundResult:
    """Plays kills one after the other on one cluster; what goes wrong stands in the result."""
    start, result = time.monotonic(), RoundResult()
    try:
        with running_fault_cluster(
            folder, NUM_SHARDS, most_shards=0, with_admin=False, reads_messages=True, **FLAGS
        ) as cluster:
            _JobKills(cluster, result).play(kills)
    except AssertionError as error:
        result.mismatches.append(str(error))
    result.seconds = time.monotonic() - start
    return result


class _JobKills:
    def __init__(self, cluster: FaultCluster, result: RoundResult) -> None:
        self._cluster = cluster
        self._result = result
        self._seed = 0

    def play(self, kills: Sequence[JobKill]) -> None:
        for kill in kills:
            self._result.fired[f"kill {kill.victim} ({kill.phase.value})"] += 1
            step = self._in_checkpoint if kill.phase in CHECKPOINT_PHASES else self._in_restore
            before = len(self._result.mismatches)
            step(kill)
            if len(self._result.mismatches) > before:
                raise AssertionError(f"after the kill of {kill.victim} in phase {kill.phase.value!r}")
        verified = verify(self._cluster)
        self._result.num_comparisons += verified.num_comparisons
        self._result.mismatches += verified.mismatches

    def _in_checkpoint(self, kill: JobKill) -> None:
        cluster = self._cluster
        self._seed += 1
        worker = cluster.workers.start(self._seed, MANY, in_flight=4, pace_s=PACE_S, new_rows=NEW_ROWS)
        worker.wait_acknowledged(CHANGES_BETWEEN)
        cluster.checkpoints.done(cluster.checkpoints.create())
        kill_in_job(cluster, kill)
        worker.wait_acknowledged(worker.noted.acknowledged + CHANGES_BETWEEN)
        self._end_all()
        self._check_list()
        compared = compare_checkpoints(cluster)
        assert compared.checkpoints, "no checkpoint is complete"
        self._result.num_comparisons += compared.num_comparisons
        self._result.mismatches += compared.mismatches

    def _check_list(self) -> None:
        """Checks that incomplete checkpoints say why, and that `latest` is none of them."""
        infos = self._cluster.checkpoints.list()
        latest = self._cluster.checkpoints.get("latest")
        newest = next(info for info in infos if info.complete)
        if not latest.complete or latest.name != newest.name:
            self._result.mismatches.append(f"latest is {latest.name}, the newest complete one {newest.name}")
        silent = [info.name for info in infos if not info.complete and not info.problem]
        self._result.mismatches += [f"checkpoint {name} is incomplete and does not say why" for name in silent]

    def _in_restore(self, kill: JobKill) -> None:
        cluster, name = self._cluster, f"restored-{self._seed + 1}"
        self._train(CHANGES_BETWEEN)
        cluster.checkpoints.done(cluster.checkpoints.create(name))
        stored = read_checkpoint(cluster.checkpoint_folder(name)).rows()
        self._train(CHANGES_BETWEEN)
        former, timeline = all_rows(cluster), self._timeline()
        assert run_differences(stored, former), "training changed nothing"
        kill_in_job(cluster, kill, name)
        if kill.phase in DECIDED or kill.victim == "caller":
            wait_for("the restore to be carried out", lambda: self._timeline() > timeline, READY_TIMEOUT_S)
        self._compare_restored(stored, former, restored=self._timeline() > timeline)
        self._train(CHANGES_BETWEEN)

    def _compare_restored(self, stored: dict[str, TableRows], former: dict[str, TableRows], *, restored: bool) -> None:
        for worker in self._cluster.workers.started:
            worker.replaced = worker.replaced or restored
        self._result.num_comparisons += len(stored)
        words = "as in the checkpoint" if restored else "as they were"
        found = run_differences(stored if restored else former, all_rows(self._cluster))
        self._result.mismatches += [f"rows are not {words}: {line}" for line in found]

    def _timeline(self) -> int:
        """Returns the timeline of the state once all shards serve the same one."""

        def same() -> int | None:
            statuses = self._cluster.statuses()
            timelines = {status.header.timeline for status in statuses}
            ready = all(status.state == shard_pb2.SERVING_STATE_SERVING for status in statuses)
            return timelines.pop() if ready and len(timelines) == 1 else None

        return _retried("all shards to serve one timeline", same)

    def _train(self, count: int) -> None:
        """Has a worker make changes and leave."""
        self._seed += 1
        worker = self._cluster.workers.start(self._seed, count, in_flight=4, new_rows=NEW_ROWS)
        status = self._cluster.wait_end(worker)
        assert status == 0, f"{worker.noted.error}\n{worker.log_text()}"
        self._result.num_changes += count

    def _end_all(self) -> None:
        running = [worker for worker in self._cluster.workers.started if worker.alive]
        for worker in running:
            worker.end()
        for worker in running:
            status = self._cluster.wait_end(worker)
            assert worker.noted.done, f"{worker.name} ended with {status}: {worker.noted.error}\n{worker.log_text()[-2000:]}"
            self._result.num_changes += worker.noted.acknowledged


def _retried(what: str, look: Callable[[], int | None]) -> int:
    """Waits for an answer of shards that may be starting."""

    def try_once() -> int | None:
        try:
            return look()
        except (ShardamError, KeyError):
            return None

    return wait_for(what, try_once, READY_TIMEOUT_S)
