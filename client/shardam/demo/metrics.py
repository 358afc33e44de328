"""How good predicted clicks are: area under the ROC curve and log loss. Knows arrays, nothing of models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def area_under_curve(labels: NDArray[np.float32], scores: NDArray[np.float64]) -> float:
    """Returns the probability that a random click scores above a random non-click, ties counting half.

    Args:
        labels: float32 [N], 0 or 1.
        scores: float64 [N]; any increasing function of the probability.

    Raises:
        ValueError: a score is NaN, or the labels are all equal.

    Source: the Mann-Whitney U statistic; Hanley and McNeil 1982.
    """
    clicked = labels > 0
    clicks = int(np.count_nonzero(clicked))
    others = len(labels) - clicks
    if clicks == 0 or others == 0:
        raise ValueError(f"AUC needs both labels, got {clicks} clicks in {len(labels)} samples")
    if np.isnan(scores).any():
        raise ValueError("AUC needs numbers, but a score is NaN: training has diverged, try a smaller learning rate")
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2.0
    click_ranks = float(mean_rank[group][clicked].sum())
    return (click_ranks - clicks * (clicks + 1) / 2.0) / (clicks * others)


def log_loss(labels: NDArray[np.float32], logits: NDArray[np.float64]) -> float:
    """Returns the mean binary cross entropy in nats.

    Args:
        labels: float32 [N], 0 or 1.
        logits: float64 [N], log odds of a click; computed from them so that sure predictions do not overflow.
    """
    return float(np.mean(np.logaddexp(0.0, logits) - labels.astype(np.float64) * logits))
