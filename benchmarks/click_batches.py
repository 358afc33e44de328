"""Synthetic click data in the shape of ad click logs, as batches: 13 counts, 26 categorical fields, labels of a hidden model.

The generator is the demo's, with fields of other sizes: some have three ids, some more than a hundred thousand. Nothing here
was measured anywhere.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from shardam.demo.data_synthetic import CLICK_RATE_LOGIT, NUM_DENSE, _hidden_logits, _zipf_ranks
from shardam.demo.features import scale_dense

LARGEST_FIELD = 500_000
"""Larger fields are cut to so many ids, as one hashes them; all fields together have 3.1M."""

FIELD_SIZES = tuple(
    min(size, LARGEST_FIELD)
    for size in (
        *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
        *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
    )
)
"""Distinct ids of the fields of the display advertising log on which click models are customarily compared."""

SMOKE_FIELD_SIZES = tuple(min(size, 50) for size in FIELD_SIZES)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of one step.

    Attributes:
        dense: float32 [B, 13].
        row_ids: int64 [26, B].
        labels: float32 [B].
    """

    dense: torch.Tensor
    row_ids: torch.Tensor
    labels: torch.Tensor


def make_batches(field_sizes: tuple[int, ...], batch: int, num_batches: int, *, seed: int = 0) -> list[Batch]:
    """Generates batches; the same seed gives the same ones."""
    random = np.random.default_rng(seed)
    sizes = np.array(field_sizes)
    count = batch * num_batches
    ranks = np.stack([_zipf_ranks(random, size, count) for size in field_sizes], axis=1)
    dense = scale_dense(np.floor(np.exp(random.normal(1.0, 1.5, (count, NUM_DENSE)))), np.zeros(count, np.bool_))
    logits = _hidden_logits(random, sizes, ranks, dense) + CLICK_RATE_LOGIT
    labels = (random.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    row_ids = np.stack([random.permutation(size)[ranks[:, field]] for field, size in enumerate(field_sizes)])
    return [
        Batch(
            torch.from_numpy(dense[start : start + batch].astype(np.float32)),
            torch.from_numpy(np.ascontiguousarray(row_ids[:, start : start + batch])),
            torch.from_numpy(labels[start : start + batch]),
        )
        for start in range(0, count, batch)
    ]
