"""A worker of the demo: trains its share of each batch against the shards; rank 0 also measures and trains the baseline."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardam
from shardam.demo.baseline import Baseline, vocabularies
from shardam.demo.dataset import ClickData
from shardam.demo.events import Progress, emit
from shardam.demo.model import DenseTower, ShardedFields
from shardam.demo.train import LEARNING_RATE, Share, Throughput, Trainer, choose_batch_size, evaluate, split


@dataclasses.dataclass(frozen=True)
class Run:
    """What all workers of a run agree on.

    Args:
        data: the samples.
        epochs: >= 1.
        seed: of the tower's initial weights and of the order of samples.
    """

    data: ClickData
    epochs: int
    seed: int


class Worker:
    """One rank of the run.

    Args:
        run: the same on all ranks.
        cluster: this process's connection.

    The process group must exist.
    """

    def __init__(self, run: Run, cluster: shardam.Cluster) -> None:
        self._run = run
        self._cluster = cluster
        self._rank = dist.get_rank()
        workers = dist.get_world_size()
        self._train, self._test = split(run.data, run.data.row_ids)
        self._share = Share(self._rank, workers, choose_batch_size(len(self._train), workers))
        self._fields = ShardedFields(run.data.fields, cluster)
        torch.manual_seed(run.seed)
        self._tower = DenseTower(len(run.data.fields), run.data.dense.shape[1])
        self._table_step_before = self._table_step()
        self._baseline = self._make_baseline() if self._rank == 0 else None
        dist.barrier()  # no rank may push before rank 0 has read the initial rows
        self._sparse = shardam.SparseAdam(self._fields.tables, lr=LEARNING_RATE)
        replica = DistributedDataParallel(self._tower)
        dense = torch.optim.Adam(replica.parameters(), lr=LEARNING_RATE)
        self._trainer = Trainer(self._fields, replica, [self._sparse, dense])
        self._throughput = Throughput()
        self._steps = 0

    def _make_baseline(self) -> Baseline:
        known, places = vocabularies(self._run.data)
        initial_rows = [
            self._cluster.table(field).pull(row_ids) for field, row_ids in zip(self._run.data.fields, known, strict=True)
        ]
        self._emit_row_to_show()
        return Baseline(self._run.data, places, initial_rows, copy.deepcopy(self._tower))

    def _emit_row_to_show(self) -> None:
        """Tells which row is shown at the end, the shown field's most frequent one, and its weight before training."""
        data = self._run.data
        column = data.row_ids[~data.is_test, data.fields.index(data.shown_field)]
        values, counts = np.unique(column, return_counts=True)
        chosen = values[np.argmax(counts)]
        before = self._cluster.table(data.shown_field).pull(np.array([chosen]))[0]
        emit(
            "moved",
            table=data.shown_field,
            row_id=str(chosen),
            title=data.row_titles.get(str(chosen), ""),
            samples=int(counts.max()),
            before=before.tolist(),
        )

    def run(self) -> None:
        """Trains all epochs; rank 0 emits an "epoch" event after each and "end" after the last.

        In sync mode a step of this worker is one of the group's, and the rows are the same after it on every rank.
        """
        for epoch in range(1, self._run.epochs + 1):
            baseline = self._baseline
            local = baseline.run_epoch(epoch, self._run.seed, self._share.batch_size) if baseline else None
            dist.barrier()
            self._train_epoch(epoch)
            if baseline and local:
                self._emit_epoch(epoch, local, baseline.throughput.samples_per_s)
            dist.barrier()  # pushes of the next epoch may not change the rows that are being evaluated
        if self._rank == 0:
            emit(
                "end",
                rows=sum(self._cluster.table(field).stats().num_rows for field in self._run.data.fields),
                batch_size=self._share.batch_size,
                steps=self._steps,
                table_steps=self._table_step() - self._table_step_before,
            )

    def _table_step(self) -> int:
        """Returns how many steps a table has taken; a batch names rows of every table, so all take the same."""
        return self._cluster.table(self._run.data.fields[0]).stats().table_step

    def _train_epoch(self, epoch: int) -> None:
        batches_of_epoch = len(self._train) // self._share.batch_size
        total = batches_of_epoch * self._share.batch_size
        progress = Progress("shardam", epoch, total, enabled=self._rank == 0)
        batches = self._share.batches(len(self._train), self._run.seed, epoch)
        workers = dist.get_world_size()

        def train() -> None:
            self._trainer.train_epoch(self._train, batches, lambda samples: progress.advance(samples * workers))
            self._sparse.synchronize()
            dist.barrier()

        self._throughput.time(total, train)
        self._steps += batches_of_epoch

    def _emit_epoch(self, epoch: int, local: tuple[float, float], local_samples_per_s: float) -> None:
        auc, loss = evaluate(self._fields, self._tower, self._test)
        emit(
            "epoch",
            epoch=epoch,
            auc=auc,
            log_loss=loss,
            samples_per_s=self._throughput.samples_per_s,
            baseline_auc=local[0],
            baseline_log_loss=local[1],
            baseline_samples_per_s=local_samples_per_s,
        )
