"""What other processes do with a table that they are handed: load data from it, pull and push."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from shardam import AdamOptions, Table


class PulledRows(Dataset[tuple[int, torch.Tensor]]):
    """Ids 0 .. n - 1 with their rows, which each process pulls itself."""

    def __init__(self, table: Table, count: int) -> None:
        self._table = table
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row_id: int) -> tuple[int, torch.Tensor]:
        return row_id, torch.from_numpy(self._table.pull([row_id])[0])


def pull_and_push(table: Table) -> None:
    """Pulls row 1 and pushes to it once; leaves the client open."""
    table.pull([1])
    table.push([1], np.ones((1, table.dim), np.float32), AdamOptions(lr=0.1))


def queue_push(table: Table) -> None:
    """Queues a push to row 1 and does not wait for it."""
    from shardam._push_checks import merged_gradient

    rows = np.ones((1, table.dim), np.float32)
    table.cluster._queue_push([merged_gradient(table.info(), np.array([1]), rows, AdamOptions(lr=0.1), 1.0)])
