"""Whole steps and pulls by id: native code against the reference, bit for bit, whatever index and number of threads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.kernels import assert_same_bits

from shardam_kernels import native, reference
from shardam_kernels.factors import AdamOptions, Factors, factors, row_step_factors
from shardam_kernels.initializers import InitialRows, fold_normal
from shardam_kernels.layout import layout
from shardam_kernels.row_steps import Rounding, RowSteps

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

SEED = 7
NUM_IDS = 3000
INITIAL = InitialRows(fold_normal(0.0, 1.0), SEED, padding_idx=3)
OPTIONS = AdamOptions(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True)


class Side:
    """A table of one implementation: index, records and what was touched."""

    def __init__(self, dim: int, dtype: str, *, bounded: bool, threads: int | None) -> None:
        self.layout = layout(dim, dtype)
        self.threads = threads  # None: the reference
        self.index = native.ArrayIndex(NUM_IDS) if bounded else native.HashIndex()
        self.touches = np.zeros((NUM_IDS, 2), np.uint64)
        kind = native if threads else reference
        self.records = kind.Records(kind.Arena(self.layout.stride_bytes), self.layout)
        self.records.arena.reserve(NUM_IDS)

    def push(
        self, row_ids: Int64s, gradients: Float32s, step: Factors, t: int, own_steps: npt.NDArray[np.int64] | None = None
    ) -> int:
        """Applies a step, whose rows are at their own steps if these are given by id; returns saturated weights."""
        extra = () if self.threads is None else (self.threads,)
        kind = reference if self.threads is None else native
        rows = kind.group_rows(row_ids, gradients, step, *extra)
        distinct = rows.merged.row_ids if self.threads is None else rows.row_ids
        assert rows.find(self.index) == rows.num_absent
        places = rows.insert(self.index)
        assert rows.num_absent == 0 or self.threads is None
        kind.initialize(self.records, rows.slots[places], distinct[places], INITIAL)
        row_steps = None
        if own_steps is not None:
            steps = own_steps[distinct]
            rounding = None if self.layout.dtype == "float32" else Rounding(SEED, np.ascontiguousarray(distinct), steps)
            row_steps = RowSteps(row_step_factors(OPTIONS, steps), rounding)
        saturated: int = kind.update_rows(self.records, rows, step, self.touches, 100 + t, t, row_steps, SEED, *extra)
        return saturated

    def bytes(self) -> npt.NDArray[np.uint8]:
        return np.stack([self.records.arena.view_record(slot) for slot in range(self.index.num_slots)])

    def pull(self, row_ids: Int64s) -> Float32s:
        memory = np.zeros(4 + row_ids.size * self.layout.dim * 4, np.uint8)
        out = memory[4:].view(np.float32).reshape(row_ids.size, self.layout.dim)  # where a float32 may be, and no vector
        if self.threads is None:
            reference.gather_rows(self.records, self.index, row_ids, INITIAL, out)
        else:
            native.gather_rows(self.records, self.index, row_ids, INITIAL, out, self.threads)
        return out


def pushes(rng: np.random.Generator, dim: int) -> list[tuple[Int64s, Float32s]]:
    """Returns steps of few and many rows: none named twice, some named often, one alone, and none at all."""
    made = []
    for count, few in ((1, 1), (40, 5), (700, 60), (2500, NUM_IDS), (0, 1), (900, 1)):
        row_ids = rng.integers(0, few, count) if few < NUM_IDS else rng.permutation(NUM_IDS)[:count]
        scale = rng.choice(np.array([1e-20, 1e-3, 1, 1e6], np.float32), (count, 1))
        made.append((row_ids, rng.standard_normal((count, dim)).astype(np.float32) * scale))
    return made


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [1, 3, 33, 64, 513])
def test_steps_and_pulls_by_id_have_the_references_bits(dim: int, dtype: str, bounded: bool) -> None:
    rng = np.random.default_rng(dim)
    sides = [Side(dim, dtype, bounded=bounded, threads=threads) for threads in (None, 1, 2, 4)]
    for t, (row_ids, gradients) in enumerate(pushes(rng, dim), 1):
        step = factors(OPTIONS, t, grad_scale=2.0 if t % 2 else 1.0, contributions=3 if t % 3 == 0 else 1)
        saturated = {side.push(row_ids, gradients, step, t) for side in sides}
        assert len(saturated) == 1
        asked = rng.integers(0, NUM_IDS, 500)
        expected, *others = sides
        for other in others:
            assert_same_bits(other.bytes(), expected.bytes(), f"step {t}, {other.threads} threads")
            assert_same_bits(other.touches, expected.touches)
            assert_same_bits(other.pull(asked), expected.pull(asked), f"step {t}, {other.threads} threads")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_at_steps_of_their_own_have_the_references_bits(dtype: str) -> None:
    rng = np.random.default_rng(5)
    sides = [Side(20, dtype, bounded=True, threads=threads) for threads in (None, 1, 3)]
    own_steps = rng.integers(1, 40, NUM_IDS)
    for t, (row_ids, gradients) in enumerate(pushes(rng, 20), 1):
        for side in sides:
            side.push(row_ids, gradients, factors(OPTIONS, t), t, own_steps)
        for other in sides[1:]:
            assert_same_bits(other.bytes(), sides[0].bytes(), f"step {t}, {other.threads} threads")


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    ("values", "grad_scale", "bad"),
    [
        ([1.0, np.inf, 1.0], 1.0, [1]),
        ([np.nan, 1.0, 1.0], 1.0, [0]),
        ([2.0**63, 1.0, 2.0**63], 1.0, [0]),  # ids 5, 6, 5: the sum is 2**64
        ([2.0**63, 1.0, -(2.0**63)], 1.0, []),
        ([1.0, 2.0**63, 1.0], 0.5, [1]),
        ([1.0, 2.0**65, 1.0], 4.0, []),
    ],
)
def test_rows_with_a_sum_that_must_be_refused_are_named(
    threads: int, values: list[float], grad_scale: float, bad: list[int]
) -> None:
    row_ids = np.array([5, 6, 5])
    gradients = np.ones((3, 70), np.float32)
    gradients[:, 69] = values
    step = factors(OPTIONS, 1, grad_scale=grad_scale, contributions=2)
    assert native.group_rows(row_ids, gradients, step, threads).bad_rows.tolist() == bad
    assert reference.group_rows(row_ids, gradients, step).merged.bad_rows.tolist() == bad


def test_a_step_copies_no_gradient_and_names_the_ids_it_was_given() -> None:
    gradients = np.arange(8, dtype=np.float32).reshape(4, 2)
    distinct = native.group_rows(np.array([4, 1, 9, 0]), gradients, factors(OPTIONS, 1))
    assert distinct.row_ids.tolist() == [4, 1, 9, 0]
    repeated = native.group_rows(np.array([4, 1, 4, 0]), gradients, factors(OPTIONS, 1))
    assert (repeated.num_rows, repeated.row_ids.tolist()) == (3, [4, 1, 0])
    assert not repeated.row_ids.flags.writeable
    side = Side(2, "float32", bounded=True, threads=1)
    row_ids, step = np.array([4, 1, 9, 0]), factors(AdamOptions(betas=(0.0, 0.999)), 1)
    rows = native.group_rows(row_ids, gradients, step)
    rows.find(side.index)
    rows.insert(side.index)
    gradients[:] = 5  # before it is applied: what is applied is what lies there then
    native.update_rows(side.records, rows, step, side.touches, 1, 1)
    exp_avg = np.empty((4, 2), np.float32)
    native.read_component(side.records, "exp_avg", np.ascontiguousarray(rows.slots), exp_avg)
    assert (exp_avg == 5).all()


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    side = Side(2, "float32", bounded=True, threads=1)
    step, gradients = factors(OPTIONS, 1), np.ones((2, 2), np.float32)
    rows = native.group_rows(np.array([1, 2]), gradients, step)
    with pytest.raises(ValueError, match="no slots yet"):
        native.update_rows(side.records, rows, step, side.touches, 1, 1)
    assert rows.find(side.index) == 2
    with pytest.raises(IndexError, match="slot -1 lies outside"):
        native.update_rows(side.records, rows, step, side.touches, 1, 1)
    rows.insert(side.index)
    with pytest.raises(IndexError, match="touches has 1 rows, the step touches slot 1"):
        native.update_rows(side.records, rows, step, side.touches[:1], 1, 1)
    other = Side(3, "float32", bounded=True, threads=1)
    with pytest.raises(ValueError, match="gradients has 2 columns, the records have dim 3"):
        native.update_rows(other.records, rows, step, other.touches, 1, 1)
    outside = native.group_rows(np.array([1, NUM_IDS]), gradients, step)
    with pytest.raises(IndexError, match=f"row id {NUM_IDS} lies outside 0 to {NUM_IDS - 1}"):
        outside.find(side.index)
    with pytest.raises(IndexError, match="row id -1 lies outside"):
        side.pull(np.array([0, -1]))
    small = native.Records(native.Arena(side.layout.stride_bytes), side.layout)
    with pytest.raises(IndexError, match="the arena has room for 0"):
        native.gather_rows(small, side.index, np.array([1]), INITIAL, np.empty((1, 2), np.float32))
    assert not side.bytes()[:, 8:].any()
    assert not side.touches.any()
