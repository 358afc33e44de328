"""A worker of the demo: trains its share of each batch against the shards; rank 0 also measures and trains the baseline."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardam
from shardam.demo.baseline import Baseline, vocabularies
from shardam.demo.checkpoints import FORMAT, Identity, Keeper, Position, Terms, read_addition
from shardam.demo.dataset import ClickData
from shardam.demo.events import Progress, Value, emit
from shardam.demo.model import DenseTower, ShardedFields
from shardam.demo.train import LEARNING_RATE, PhaseTotals, Share, Throughput, Trainer, choose_batch_size, evaluate, split


@dataclasses.dataclass(frozen=True)
class Run:
    """What all workers of a run agree on.

    Args:
        data: the samples.
        epochs: >= 1.
        seed: of the tower's initial weights and of the order of samples.
        terms: of its checkpoints.
    """

    data: ClickData
    epochs: int
    seed: int
    terms: Terms

    def identity(self, mode: str) -> Identity:
        """Returns what a checkpoint must have in common with this run; of all ranks the same.

        Raises:
            BadOption: there are more workers than samples of a step.
        """
        batch_size = choose_batch_size(self.data.num_train, dist.get_world_size())
        return Identity.of(self.data, self.seed, batch_size, mode)


class Worker:
    """One rank of the run.

    Args:
        run: the same on all ranks.
        cluster: this process's connection.

    The process group must exist. If the run goes on from a checkpoint, the cluster has been restored from it.

    Raises:
        CheckpointMismatch: that checkpoint is of another kind of run.
    """

    def __init__(self, run: Run, cluster: shardam.Cluster) -> None:
        self._run = run
        self._cluster = cluster
        self._rank = dist.get_rank()
        workers = dist.get_world_size()
        self._train, self._test = split(run.data, run.data.row_ids)
        self._share = Share(self._rank, workers, choose_batch_size(len(self._train), workers))
        self._identity = run.identity(cluster.mode)
        self._fields = ShardedFields(run.data.fields, cluster)
        torch.manual_seed(run.seed)
        self._tower = DenseTower(len(run.data.fields), run.data.dense.shape[1])
        self._table_step_before = self._table_step()
        self._shown: dict[str, Value] = {}
        self._baseline = self._make_baseline() if self._rank == 0 else None
        dist.barrier()  # no rank may push before rank 0 has read the initial rows
        self._sparse = shardam.SparseAdam(self._fields.tables, lr=LEARNING_RATE)
        replica = DistributedDataParallel(self._tower)
        dense = torch.optim.Adam(replica.parameters(), lr=LEARNING_RATE)
        self._trainer = Trainer(self._fields, replica, [self._sparse, dense])
        self._throughput = Throughput()
        self._phases = PhaseTotals()
        self._at = Position()
        self._local: tuple[float, float] | None = None
        self._keeper = Keeper(run.terms, cluster)
        if run.terms.resume is not None:
            self._resume(run.terms.resume)
        if self._rank == 0:
            emit("moved", **self._shown)

    def _make_baseline(self) -> Baseline:
        known, places = vocabularies(self._run.data)
        initial_rows = [
            self._cluster.table(field).pull(row_ids) for field, row_ids in zip(self._run.data.fields, known, strict=True)
        ]
        self._choose_row_to_show()
        return Baseline(self._run.data, places, initial_rows, copy.deepcopy(self._tower))

    def _choose_row_to_show(self) -> None:
        """Notes which row is shown at the end, the shown field's most frequent one, and its weight before training."""
        data = self._run.data
        column = data.row_ids[~data.is_test, data.fields.index(data.shown_field)]
        values, counts = np.unique(column, return_counts=True)
        chosen = values[np.argmax(counts)]
        before = self._cluster.table(data.shown_field).pull(np.array([chosen]))[0]
        self._shown = {
            "table": data.shown_field,
            "row_id": str(chosen),
            "title": data.row_titles.get(str(chosen), ""),
            "samples": int(counts.max()),
            "before": before.tolist(),
        }

    def run(self) -> None:
        """Trains all epochs; rank 0 emits an "epoch" event after each and "end" after the last.

        In sync mode a step of this worker is one of the group's, and the rows are the same after it on every rank. A run that
        is told to stop does so after a step, with a checkpoint, and rank 0 emits "stopped".
        """
        while self._at.epoch <= self._run.epochs:
            if self._keeper.stops:
                self._stop()
                return
            if self._baseline and self._local is None:
                self._local = self._baseline.run_epoch(self._at.epoch, self._run.seed, self._share.batch_size)
            dist.barrier()
            if not self._train_epoch():
                self._stop()
                return
            if self._baseline and self._local:
                self._emit_epoch(self._local, self._baseline.throughput.samples_per_s)
            dist.barrier()  # pushes of the next epoch may not change the rows that are being evaluated
            self._at = Position(self._at.epoch + 1, 0, self._at.steps)
            self._local = None
        if self._rank == 0:
            emit("timings", steps=self._phases.steps, total_s=self._phases.total_s)
            emit(
                "end",
                rows=sum(self._cluster.table(field).stats().num_rows for field in self._run.data.fields),
                batch_size=self._share.batch_size,
                steps=self._at.steps,
                table_steps=self._table_step() - self._table_step_before,
            )

    def _table_step(self) -> int:
        """Returns how many steps a table has taken; a batch names rows of every table, so all take the same."""
        return self._cluster.table(self._run.data.fields[0]).stats().table_step

    def _train_epoch(self) -> bool:
        """Trains what is left of the epoch; returns False if the run was told to stop."""
        batch_size, done = self._share.batch_size, self._at.batches
        total = len(self._train) // batch_size * batch_size
        progress = Progress("shardam", self._at.epoch, total, enabled=self._rank == 0, done=done * batch_size)
        batches = self._share.batches(len(self._train), self._run.seed, self._at.epoch)
        for batch in itertools.islice(batches, done, None):
            with self._throughput.measured(), self._phases.counted(self._cluster):
                self._trainer.step(self._train.take(batch))
            self._throughput.samples += batch_size
            self._at = Position(self._at.epoch, self._at.batches + 1, self._at.steps + 1)
            progress.advance(batch_size)
            if self._keeper.stops:
                return False
            if self._keeper.is_due(self._at.steps):
                self._make_checkpoint()
        self._synchronize()
        return True

    def _synchronize(self) -> None:
        with self._throughput.measured():
            self._sparse.synchronize()
            dist.barrier()

    def _make_checkpoint(self) -> str | None:
        self._synchronize()
        return self._keeper.make(self._at, self._addition() if self._rank == 0 else {})

    def _stop(self) -> None:
        """Ends the run with a checkpoint of where it is."""
        name = self._make_checkpoint()
        if self._rank == 0:
            emit("stopped", name=name, epoch=self._at.epoch, steps=self._at.steps)

    def _addition(self) -> dict[str, Any]:
        """Returns what goes with the tables' state into a checkpoint."""
        return {
            "demo": FORMAT,
            "identity": dataclasses.asdict(self._identity),
            "position": dataclasses.asdict(self._at),
            "trainer": self._trainer.state(),
            "throughput": dataclasses.asdict(self._throughput),
            "baseline": self._baseline.state() if self._baseline else None,
            "local": self._local,
            "shown": self._shown,
            "table_step_before": self._table_step_before,
        }

    def _resume(self, name: str) -> None:
        """Takes over where the checkpoint's run was; its rows are in the tables already."""
        saved = read_addition(self._cluster, name, self._identity)
        self._trainer.load(saved["trainer"])
        self._at = Position(**saved["position"])
        self._table_step_before = saved["table_step_before"]
        if self._baseline is None:
            return
        self._baseline.load(saved["baseline"])
        self._throughput = Throughput(**saved["throughput"])
        self._local = None if saved["local"] is None else (saved["local"][0], saved["local"][1])
        self._shown = saved["shown"]
        emit("resumed", epoch=self._at.epoch, steps=self._at.steps)

    def _emit_epoch(self, local: tuple[float, float], local_samples_per_s: float) -> None:
        auc, loss = evaluate(self._fields, self._tower, self._test)
        emit(
            "epoch",
            epoch=self._at.epoch,
            auc=auc,
            log_loss=loss,
            samples_per_s=self._throughput.samples_per_s,
            baseline_auc=local[0],
            baseline_log_loss=local[1],
            baseline_samples_per_s=local_samples_per_s,
        )
