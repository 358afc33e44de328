"""Sums of a lookup's gradients by place: torch's bits, wherever the gradients lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardam_kernels import native

PLACES = st.lists(st.integers(0, 9), max_size=40)


@given(PLACES, st.integers(1, 35), st.none() | st.integers(0, 9), st.integers(0, 3))
def test_sums_have_the_bits_of_torchs_embedding_backward(places: list[int], dim: int, skipped: int | None, seed: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((len(places), dim), np.float32)
    gradients[::3] = -0.0
    weight = torch.zeros(10, dim, requires_grad=True)
    ids = torch.tensor(places, dtype=torch.int64)
    torch.nn.functional.embedding(ids, weight, padding_idx=skipped).backward(torch.from_numpy(gradients))
    found = np.full((10, dim), np.nan, np.float32)
    native.sum_places(gradients, np.array(places, np.int64), found, skipped)
    assert weight.grad is not None
    assert found.tobytes() == weight.grad.numpy().tobytes()


def test_gradients_may_be_every_other_row_of_something_larger() -> None:
    whole = np.random.default_rng(0).standard_normal((6, 2, 8), np.float32)
    places = np.array([1, 0, 1, 1, 2, 0])
    apart, together = np.empty((3, 8), np.float32), np.empty((3, 8), np.float32)
    native.sum_places(whole[:, 1], places, apart)
    native.sum_places(np.ascontiguousarray(whole[:, 1]), places, together)
    assert np.array_equal(apart, together)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    gradients, places, out = np.zeros((3, 2), np.float32), np.array([0, 1, 0]), np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="places has length 2, gradients has 3"):
        native.sum_places(gradients, places[:2], out)
    with pytest.raises(ValueError, match="gradients have 2 columns, out has 3"):
        native.sum_places(gradients, places, np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="each row of gradients must be contiguous"):
        native.sum_places(np.zeros((2, 3), np.float32).T, places, out)
    for place in (-1, 2):
        with pytest.raises(IndexError, match=f"place {place} is none of the 2 rows of out"):
            native.sum_places(gradients, np.array([0, place, 0]), out)
    with pytest.raises(TypeError):
        native.sum_places(gradients.astype(np.float64), places, out)
    assert (out == 1).all()
