"""Training and evaluation of the click model, the same code for shards and for the local baseline."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardam.cluster import Cluster
from shardam.demo.dataset import ClickData
from shardam.demo.metrics import area_under_curve, log_loss
from shardam_proto.errors import BadOption

BATCH_SIZE = 512
"""Samples of a step over all workers."""

LEARNING_RATE = 1e-3
"""Of SparseAdam and of the dense Adam."""

EVALUATION_BATCH_SIZE = 4_096
"""Bounds the memory of an evaluation."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples as tensors.

    Args:
        row_ids: int64 [N, F]; raw ids, or places for the baseline.
        dense: float32 [N, K].
        labels: float32 [N].
    """

    row_ids: Tensor
    dense: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: slice | Tensor) -> Samples:
        """Returns the chosen samples."""
        return Samples(self.row_ids[index], self.dense[index], self.labels[index])


def split(data: ClickData, row_ids: NDArray[np.int64]) -> tuple[Samples, Samples]:
    """Returns training and test samples, with the given ids (int64 [N, F]) instead of the data's own."""
    whole = Samples(torch.from_numpy(row_ids), torch.from_numpy(data.dense), torch.from_numpy(data.labels))
    is_test = torch.from_numpy(data.is_test)
    return whole.take(~is_test), whole.take(is_test)


@dataclasses.dataclass(frozen=True)
class Share:
    """Which samples of each batch a worker trains on.

    Args:
        rank: 0 .. workers - 1; the baseline is rank 0 of 1.
        workers: their number.
        batch_size: samples of a step over all workers, a multiple of `workers`.
    """

    rank: int
    workers: int
    batch_size: int

    def batches(self, num_samples: int, seed: int, epoch: int) -> Iterator[Tensor]:
        """Yields this worker's part of each batch: int64 [batch_size / workers] positions in the training samples.

        All workers and the baseline draw the same order, so their batches are the same sets. Samples that fill no batch are
        left out of this epoch: DDP averages over workers, and parts of unequal size would weigh unequally.
        """
        order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(num_samples))
        own = self.batch_size // self.workers
        for first in range(0, num_samples - self.batch_size + 1, self.batch_size):
            start = first + self.rank * own
            yield order[start : start + own]


def choose_batch_size(num_train: int, workers: int) -> int:
    """Returns the largest multiple of `workers` within BATCH_SIZE and the number of training samples.

    Raises:
        BadOption: there are more workers than BATCH_SIZE or training samples.
    """
    batch_size = min(BATCH_SIZE, num_train) // workers * workers
    if batch_size == 0:
        raise BadOption(f"{workers} workers cannot share a batch of {min(BATCH_SIZE, num_train)} samples: use fewer --workers")
    return batch_size


class Trainer:
    """A click model with its optimizers.

    Args:
        fields: maps int64 [B, F] to float32 [B, F, dim].
        tower: maps that and float32 [B, K] to logits [B].
        optimizers: of both; each steps once a batch.
    """

    def __init__(self, fields: nn.Module, tower: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._fields = fields
        self._tower = tower
        self._optimizers = optimizers
        self._loss = nn.BCEWithLogitsLoss()

    def step(self, samples: Samples) -> None:
        """Takes one optimizer step on the mean loss of the samples."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        logits = self._tower(self._fields(samples.row_ids), samples.dense)
        self._loss(logits, samples.labels).backward()
        for optimizer in self._optimizers:
            optimizer.step()

    def state(self) -> dict[str, Any]:
        """Returns what the tower and torch's own optimizers are; of modules on shards their cluster keeps the rows."""
        return {
            "tower": self._tower.state_dict(),
            "fields": self._fields.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes what `state` returned."""
        self._tower.load_state_dict(state["tower"])
        self._fields.load_state_dict(state["fields"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def train_epoch(self, samples: Samples, batches: Iterator[Tensor], advance: Callable[[int], None]) -> None:
        """Steps through the batches; `advance` is told the number of samples after each."""
        for batch in batches:
            self.step(samples.take(batch))
            advance(len(batch))


@torch.no_grad()
def evaluate(fields: nn.Module, tower: nn.Module, samples: Samples) -> tuple[float, float]:
    """Returns AUC and log loss over the samples; changes nothing."""
    parts = [samples.take(slice(at, at + EVALUATION_BATCH_SIZE)) for at in range(0, len(samples), EVALUATION_BATCH_SIZE)]
    logits = torch.cat([tower(fields(part.row_ids), part.dense) for part in parts]).double().numpy()
    labels = samples.labels.numpy()
    return area_under_curve(labels, logits), log_loss(labels, logits)


@dataclasses.dataclass
class Throughput:
    """Samples trained on per second of training, without evaluation, checkpoints and start."""

    samples: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Counts what is done inside as time of training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    @property
    def samples_per_s(self) -> float:
        """The mean so far."""
        return self.samples / self.seconds


@dataclasses.dataclass
class PhaseTotals:
    """Seconds of each phase of a client's steps, of training alone.

    Attributes:
        steps: steps counted.
        total_s: seconds by phase.
    """

    steps: int = 0
    total_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def counted(self, cluster: Cluster) -> Iterator[None]:
        """Counts what ends while a step is taken inside; evaluations and checkpoints lie between steps."""
        cluster.timings(reset=True)
        yield
        self.steps += 1
        for phase, times in cluster.timings(reset=True).items():
            self.total_s[phase] = self.total_s.get(phase, 0.0) + times.total_s
