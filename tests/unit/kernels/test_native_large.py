"""Tables whose elements cannot be counted in 32 bits; pages that are never written cost no memory."""

from __future__ import annotations

import numpy as np
import pytest

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import RowSteps

DIM, NUM_SLOTS = 128, 2**25
"""2**32 elements of weights, 51 GB of records."""


@pytest.mark.case("C034")
def test_rows_beyond_two_to_the_31_elements_are_updated_and_nothing_else() -> None:
    records = native.Records(native.Arena(layout(DIM).stride_bytes), layout(DIM))
    records.arena.reserve(NUM_SLOTS)
    first_beyond = 2**31 // DIM
    touched = np.array([NUM_SLOTS - 1, first_beyond, 0], np.int64)
    wrapped = np.array([(NUM_SLOTS - 1) % first_beyond, first_beyond - 1, 1], np.int64)  # where 32 bits would go
    step = factors(AdamOptions(lr=0.1), 1)
    gradients = np.ones((3, DIM), np.float32)
    native.adam_update(records, touched, gradients, step, RowSteps(step.step_factors(3)))
    weights = np.empty((6, DIM), np.float32)
    native.read_component(records, "weight", np.concatenate([touched, wrapped]), weights)
    assert weights[:3] == pytest.approx(-0.1, rel=1e-5)
    assert not weights[3:].any()
