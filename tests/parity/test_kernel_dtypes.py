"""bfloat16 and float16 weights: rounding as CONTRACT.md says, bit for bit in every implementation (section Dtypes)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardam_testing.kernels import IMPLEMENTATIONS, Float32s, Make, NativeTable, ReferenceTable, assert_same_bits, table_bytes

from shardam_kernels.factors import AdamOptions, factors
from shardam_kernels.hashing import element_hashes, row_keys
from shardam_kernels.initializers import InitialRows, fold_constant, fold_normal
from shardam_kernels.reference.weights import round_stochastically, round_to_nearest_even, widen
from shardam_kernels.row_steps import Rounding, RowSteps

NARROW = ["bfloat16", "float16"]
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0}

VALUES = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.floats(-70000, 70000, width=32),
    st.floats(-(2**-13), 2**-13, width=32),  # float16s below 6e-5 are denormal
    st.floats(-(2**-125), 2**-125, width=32),
)


@pytest.fixture(params=list(IMPLEMENTATIONS))
def make(request: pytest.FixtureRequest) -> Make:
    return IMPLEMENTATIONS[str(request.param)]


def _exact_rounding(value: float, dtype: str, random: int) -> float:
    """CONTRACT.md's sentence in exact arithmetic: k = floor(|x| / q), one more if the fraction is above the random number."""
    bits_kept, bits_drawn = (8, 16) if dtype == "bfloat16" else (11, 24)
    least_exponent = -126 if dtype == "bfloat16" else -14
    if value == 0:
        return value
    exponent = max(math.frexp(value)[1] - 1, least_exponent)
    q = math.ldexp(1.0, exponent - bits_kept + 1)
    quotient = abs(value) / q  # exact: q is a power of two
    k = math.floor(quotient)
    drawn = random & 0xFFFF if dtype == "bfloat16" else random >> 8
    if dtype == "bfloat16":  # (bits + (r & 0xffff)) >> 16 carries if the fraction and the draw reach one together
        up = (quotient - k) * 2**bits_drawn + drawn >= 2**bits_drawn
    else:
        up = (quotient - k) * 2**bits_drawn > drawn
    return math.copysign(min((k + up) * q, LARGEST[dtype]), value)


@pytest.mark.parametrize("dtype", NARROW)
@settings(max_examples=500)
@given(VALUES, st.integers(0, 2**32 - 1))
def test_stochastic_rounding_is_the_contract_s_sentence_in_exact_arithmetic(dtype: str, value: float, random: int) -> None:
    if math.isinf(value):
        return
    bits, saturated = round_stochastically(np.array([value], np.float32), dtype, np.array([random], np.uint32))
    expected = _exact_rounding(value, dtype, random)
    assert_same_bits(widen(bits, dtype), np.array([expected], np.float32))
    if abs(value) <= LARGEST[dtype] * (1 - 2**-11):
        assert saturated == 0


@pytest.mark.parametrize("dtype", NARROW)
@settings(max_examples=500)
@given(st.lists(VALUES, min_size=1, max_size=40))
def test_nearest_even_is_torch_s_but_for_saturation(dtype: str, values: list[float]) -> None:
    array = np.array(values, np.float32)
    bits, saturated = round_to_nearest_even(array, dtype)
    expected = torch.from_numpy(array).to(TORCH_DTYPES[dtype]).float().numpy()
    assert saturated == np.isinf(expected).sum()
    assert_same_bits(widen(bits, dtype), np.clip(expected, -LARGEST[dtype], LARGEST[dtype]).astype(np.float32))


@pytest.mark.parametrize("dtype", NARROW)
def test_every_weight_is_read_as_its_exact_value_and_written_back_as_its_bits(dtype: str, make: Make) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    finite = every[(every & 0x7FFF) < (0x7F80 if dtype == "bfloat16" else 0x7C00)].reshape(-1, 16)
    exact = torch.from_numpy(finite.view(np.int16)).view(TORCH_DTYPES[dtype]).float().numpy()
    assert_same_bits(widen(finite, dtype), exact)
    table = make(16, len(finite), dtype)
    slots = np.arange(len(finite))
    assert table.write("weight", slots, exact) == 0
    assert_same_bits(table.read("weight", slots), exact)
    stored = np.stack([table.record(slot)[:32].view(np.uint16) for slot in range(0, len(finite), 97)])
    assert_same_bits(stored, finite[::97].copy())


@pytest.mark.parametrize("dtype", NARROW)
@settings(max_examples=50)
@given(st.lists(VALUES, min_size=12, max_size=12))
def test_assigned_values_have_the_reference_s_bits(dtype: str, values: list[float]) -> None:
    array = np.array(values, np.float32).reshape(3, 4)
    expected, actual = ReferenceTable(4, 3, dtype), NativeTable(4, 3, dtype)
    counts = [table.write("weight", np.arange(3), array) for table in (expected, actual)]
    assert counts[0] == counts[1]
    assert_same_bits(table_bytes(actual), table_bytes(expected))


def _step(row_ids: npt.NDArray[np.int64], t: int, s: Float32s | None = None) -> RowSteps:
    count = len(row_ids)
    step = factors(AdamOptions(), t)
    return RowSteps(step.step_factors(count) if s is None else s, Rounding(99, row_ids, np.full(count, t)))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 3, 64, 513])
def test_free_running_steps_leave_the_reference_s_bits(make: Make, dtype: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    count = 200
    row_ids = rng.integers(-(2**63), 2**63 - 1, count)
    tables = make(dim, count, dtype), ReferenceTable(dim, count, dtype)
    for table in tables:
        table.initialize(np.arange(count), row_ids, InitialRows(fold_normal(0, 1), 4))
    for t in range(1, 8):
        gradients = rng.standard_normal((count, dim)).astype(np.float32)
        named = rng.permutation(count)[: count // 2]
        for table in tables:
            table.update(named, gradients[: len(named)], factors(AdamOptions(lr=0.1), t), _step(row_ids[named], t))
        assert_same_bits(table_bytes(tables[0]), table_bytes(tables[1]), f"step {t}")


@pytest.mark.parametrize("dtype", NARROW)
def test_the_random_number_of_a_weight_is_the_hash_of_id_step_and_column(make: Make, dtype: str) -> None:
    row_ids, steps = np.array([-5, 2**60, 3]), np.array([1, 7, 2**32 - 1])
    table = make(6, 3, dtype)
    table.write("weight", np.arange(3), np.ones((3, 6), np.float32))
    table.write("exp_avg_sq", np.arange(3), np.ones((3, 6), np.float32))
    gradients = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    wide = ReferenceTable(6, 3)
    for name in ("weight", "exp_avg_sq"):
        wide.write(name, np.arange(3), np.ones((3, 6), np.float32))
    s = np.full(3, 0.01, np.float32)
    table.update(np.arange(3), gradients, factors(AdamOptions(), 1), RowSteps(s, Rounding(99, row_ids, steps)))
    wide.update(np.arange(3), gradients, factors(AdamOptions(), 1), RowSteps(s))
    keys = row_keys(99, row_ids)
    random = np.concatenate([element_hashes(keys[i : i + 1], int(steps[i]), 6) for i in range(3)])
    values = wide.read("weight", np.arange(3)).ravel().tolist()
    expected = [_exact_rounding(value, dtype, r) for value, r in zip(values, random.ravel().tolist(), strict=True)]
    assert table.read("weight", np.arange(3)).ravel().tolist() == expected


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_unbiased_where_nearest_even_would_stand_still(make: Make, dtype: str) -> None:
    spacing = 2.0 ** (-7 if dtype == "bfloat16" else -10)
    count, dim, moved = 400, 64, 0.3
    table = make(dim, count, dtype)
    table.write("weight", np.arange(count), np.ones((count, dim), np.float32))
    step = factors(AdamOptions(betas=(0.0, 0.0)), 1)  # the update is s * g / |g|
    steps = _step(np.arange(count), 1, np.full(count, -moved * spacing, np.float32))
    table.update(np.arange(count), np.ones((count, dim), np.float32), step, steps)
    up = (table.read("weight", np.arange(count)) - 1) / spacing
    assert set(np.unique(up)) == {0.0, 1.0}
    assert abs(up.mean() - moved) < 4 * math.sqrt(moved * (1 - moved) / up.size)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_step_of_zero_keeps_every_bit_of_the_weight(make: Make, dtype: str) -> None:
    table = make(16, 50, dtype)
    table.initialize(np.arange(50), np.arange(50), InitialRows(fold_normal(0, 1), 4))
    before = table.read("weight", np.arange(50))
    steps = _step(np.arange(50), 1, np.zeros(50, np.float32))
    table.update(np.arange(50), np.ones((50, 16), np.float32), factors(AdamOptions(lr=0.0), 1), steps)
    assert_same_bits(table.read("weight", np.arange(50)), before)
    assert (table.read("exp_avg", np.arange(50)) != 0).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_weights_beyond_the_dtype_saturate_and_are_counted(make: Make, dtype: str) -> None:
    largest = LARGEST[dtype]
    beyond = np.array([[3.4e38, -3.4e38, 1.0, largest, 0.0]], np.float32)
    table = make(5, 1, dtype)
    slot = np.zeros(1, np.int64)
    assert table.write("weight", slot, beyond) == 2
    assert table.read("weight", slot).tolist() == [[largest, -largest, 1.0, largest, 0.0]]
    step = factors(AdamOptions(betas=(0.0, 0.0)), 1)
    gradients = np.array([[-1, 1, 0, 0, 0]], np.float32)
    assert table.update(slot, gradients, step, _step(slot, 1, np.full(1, 3e38, np.float32))) == 2
    assert np.abs(table.read("weight", slot)).max() == largest
    assert table.initialize(slot, slot, InitialRows(fold_constant(3.4e38), 0)) == 5
    assert table.gather(np.array([-1]), slot, InitialRows(fold_constant(3.4e38), 0)).tolist() == [[largest] * 5]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 3, 10, 64])
def test_new_rows_and_absent_ones_are_rounded_to_nearest_even(make: Make, dtype: str, dim: int) -> None:
    initial = InitialRows(fold_normal(0.1, 0.05), 11, padding_idx=2)
    row_ids = np.array([0, 1, 2, -3, 2**62])
    wide, table, reference = ReferenceTable(dim, 5), make(dim, 5, dtype), ReferenceTable(dim, 5, dtype)
    for each in (wide, table, reference):
        for slot in range(5):
            each.record(slot)[:] = 0xFF
        each.initialize(np.arange(5), row_ids, initial)
    weights = torch.from_numpy(wide.read("weight", np.arange(5))).to(TORCH_DTYPES[dtype]).float().numpy()
    assert_same_bits(table_bytes(table), table_bytes(reference))
    assert_same_bits(table.gather(np.arange(5), row_ids, initial), weights)
    assert_same_bits(table.gather(np.full(5, -1), row_ids, initial), weights)
