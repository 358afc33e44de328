"""Synthetic click data in the shape of ad click logs: 13 counts, 26 categorical fields, Zipf ids, labels of a hidden model.

Nothing here was measured anywhere; it is for trying the machinery where no real data may be had.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardam.demo.dataset import ClickData
from shardam.demo.features import last_tenth, row_id, scale_dense

NUM_SAMPLES = 30_000
"""Five epochs with two workers take about half a minute on two cores."""

NUM_DENSE = 13
NUM_FIELDS = 26
"""The shape of the display advertising logs on which click models are customarily compared."""

SMALLEST_FIELD, LARGEST_FIELD = 4, 300
"""Distinct ids of the fields, spread evenly on a logarithmic scale; small enough to be learnt from 30,000 samples."""

ZIPF_EXPONENT = 1.05
"""Skew of the ids within a field, as of logs: a few ids make most of the traffic."""

HIDDEN_DIM = 4
CLICK_RATE_LOGIT = -1.1
"""Mean of the log odds; between a quarter and a third of the samples are clicks."""


def make_synthetic(seed: int, num_samples: int = NUM_SAMPLES) -> ClickData:
    """Generates the samples of a seed; the same seed gives the same samples.

    Args:
        seed: >= 0; also draws the hidden model.
        num_samples: training and test samples together.
    """
    random = np.random.default_rng(seed)
    sizes = np.geomspace(SMALLEST_FIELD, LARGEST_FIELD, NUM_FIELDS).astype(np.int64)
    ranks = np.stack([_zipf_ranks(random, int(size), num_samples) for size in sizes], axis=1)
    counts = np.floor(np.exp(random.normal(1.0, 1.5, (num_samples, NUM_DENSE))))
    is_test = last_tenth(num_samples)
    dense = scale_dense(counts, is_test)
    probability = 1.0 / (1.0 + np.exp(-_hidden_logits(random, sizes, ranks, dense)))
    row_ids = np.stack([_field_ids(field, int(size))[ranks[:, field]] for field, size in enumerate(sizes)], axis=1)
    return ClickData(
        title=f"synthetic click data, seed {seed} (13 counts, 26 categorical fields, labels of a hidden model)",
        notes=(),
        fields=tuple(f"cat_{field}" for field in range(NUM_FIELDS)),
        row_ids=row_ids,
        dense=dense,
        labels=(random.random(num_samples) < probability).astype(np.float32),
        is_test=is_test,
        shown_field=f"cat_{NUM_FIELDS - 1}",
    )


def _zipf_ranks(random: np.random.Generator, size: int, num_samples: int) -> NDArray[np.int64]:
    """Draws ranks 0 .. size - 1 with probability proportional to 1 / (rank + 1) ** ZIPF_EXPONENT."""
    weights = 1.0 / np.arange(1, size + 1) ** ZIPF_EXPONENT
    cumulative = np.cumsum(weights)
    ranks: NDArray[np.int64] = np.searchsorted(cumulative, random.random(num_samples) * cumulative[-1], side="right")
    return ranks


def _field_ids(field: int, size: int) -> NDArray[np.int64]:
    """Returns the raw ids of a field's ranks: 64-bit hashes, as logs carry them."""
    return np.array([row_id(f"cat_{field}/{rank}") for rank in range(size)], dtype=np.int64)


def _hidden_logits(
    random: np.random.Generator, sizes: NDArray[np.int64], ranks: NDArray[np.int64], dense: NDArray[np.float32]
) -> NDArray[np.float64]:
    """A factorization machine: a weight for each count and each id, and dot products between the fields' hidden vectors."""
    logits = dense @ random.normal(0.0, 0.2, NUM_DENSE)
    vector_sum = np.zeros((len(ranks), HIDDEN_DIM))
    square_sum = np.zeros(len(ranks))
    for field, size in enumerate(sizes):
        own = random.normal(0.0, 0.3, int(size))[ranks[:, field]]
        vectors = random.normal(0.0, 0.1, (int(size), HIDDEN_DIM))[ranks[:, field]]
        logits = logits + own
        vector_sum += vectors
        square_sum += (vectors * vectors).sum(axis=1)
    logits = logits + ((vector_sum * vector_sum).sum(axis=1) - square_sum) / 2
    centred: NDArray[np.float64] = logits - logits.mean() + CLICK_RATE_LOGIT
    return centred
