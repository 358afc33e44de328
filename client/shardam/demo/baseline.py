"""The yardstick: the same model, trained in one process with torch's own sparse embeddings and SparseAdam."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardam.demo.dataset import ClickData
from shardam.demo.events import Progress
from shardam.demo.model import LocalFields
from shardam.demo.train import LEARNING_RATE, Share, Throughput, Trainer, evaluate, split


def vocabularies(data: ClickData) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Returns each field's distinct ids, sorted, and the samples' places in them (int64 [N, F]).

    `torch.nn.Embedding` needs them; shards do not.
    """
    known, places = [], []
    for field in range(len(data.fields)):
        values, where = np.unique(data.row_ids[:, field], return_inverse=True)
        known.append(values)
        places.append(where)
    return known, np.stack(places, axis=1)


class Baseline:
    """Trains one epoch at a time, in between the shards' epochs, so that each has the machine to itself.

    It runs on one torch thread, as each worker does. At this size a second thread brings 15 % on an idle machine, and on a
    busy one OpenMP's spinning costs up to nine tenths.

    Args:
        data: the samples.
        places: int64 [N, F], of `vocabularies`.
        initial_rows: for each field the shards' initial weights of its vocabulary, float32 [V, dim].
        tower: a copy of the workers' initial tower; trained here.
    """

    def __init__(
        self,
        data: ClickData,
        places: NDArray[np.int64],
        initial_rows: Sequence[NDArray[np.float32]],
        tower: nn.Module,
    ) -> None:
        self._train, self._test = split(data, places)
        self._fields = LocalFields(initial_rows)
        self._tower = tower
        self._trainer = Trainer(
            self._fields,
            tower,
            [
                torch.optim.SparseAdam(list(self._fields.parameters()), lr=LEARNING_RATE),
                torch.optim.Adam(tower.parameters(), lr=LEARNING_RATE),
            ],
        )
        self.throughput = Throughput()

    def state(self) -> dict[str, Any]:
        """Returns all that a run goes on from."""
        return {"trainer": self._trainer.state(), "throughput": dataclasses.asdict(self.throughput)}

    def load(self, state: dict[str, Any]) -> None:
        """Takes what `state` returned."""
        self._trainer.load(state["trainer"])
        self.throughput = Throughput(**state["throughput"])

    def run_epoch(self, epoch: int, seed: int, batch_size: int) -> tuple[float, float]:
        """Trains one epoch (counted from 1) and returns AUC and log loss on the test samples."""
        share = Share(rank=0, workers=1, batch_size=batch_size)
        total = len(self._train) // batch_size * batch_size
        progress = Progress("baseline", epoch, total)
        batches = share.batches(len(self._train), seed, epoch)
        with self.throughput.measured():
            self._trainer.train_epoch(self._train, batches, progress.advance)
        self.throughput.samples += total
        return evaluate(self._fields, self._tower, self._test)
