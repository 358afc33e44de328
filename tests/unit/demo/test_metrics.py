"""AUC and log loss of the demo against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardam.demo.metrics import area_under_curve, log_loss


def _auc_by_pairs(labels: NDArray[np.float32], scores: NDArray[np.float64]) -> float:
    wins = 0.0
    pairs = 0
    for click in scores[labels > 0]:
        for other in scores[labels == 0]:
            pairs += 1
            wins += 1.0 if click > other else 0.5 if click == other else 0.0
    return wins / pairs


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=60))
def test_auc_is_the_share_of_pairs_in_order_with_ties_counting_half(samples: list[tuple[bool, int]]) -> None:
    labels = np.array([True, False, *(label for label, _ in samples)], dtype=np.float32)
    scores = np.array([0, 1, *(score for _, score in samples)], dtype=np.float64)
    assert area_under_curve(labels, scores) == pytest.approx(_auc_by_pairs(labels, scores), abs=1e-12)


def test_auc_of_a_perfect_and_of_a_reversed_order() -> None:
    labels = np.array([0, 0, 1, 1], dtype=np.float32)
    scores = np.array([-2.0, -1.0, 1.0, 2.0])
    assert area_under_curve(labels, scores) == 1.0
    assert area_under_curve(labels, -scores) == 0.0


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_of_one_label_alone_is_refused(label: float) -> None:
    with pytest.raises(ValueError, match="needs both labels"):
        area_under_curve(np.full(3, label, dtype=np.float32), np.zeros(3))


def test_auc_of_a_nan_score_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        area_under_curve(np.array([0, 1], dtype=np.float32), np.array([math.nan, 0.0]))


@given(st.lists(st.tuples(st.booleans(), st.floats(-15, 15)), min_size=1, max_size=50))
def test_log_loss_is_the_mean_negative_log_likelihood(samples: list[tuple[bool, float]]) -> None:
    labels = np.array([label for label, _ in samples], dtype=np.float32)
    logits = np.array([logit for _, logit in samples])
    expected = 0.0
    for label, logit in samples:
        probability = 1.0 / (1.0 + math.exp(-logit))
        expected -= math.log(probability if label else 1.0 - probability)
    assert log_loss(labels, logits) == pytest.approx(expected / len(samples), rel=1e-8)


def test_log_loss_of_a_sure_mistake_is_finite() -> None:
    assert log_loss(np.array([0.0], dtype=np.float32), np.array([1000.0])) == 1000.0
