"""What callers may hand in as ids and rows, and what is refused by name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shardam._arrays import as_flat_row_ids, as_row_ids, as_rows, check_bounds, check_rows_shape
from shardam.errors import BadOption, IdOutOfRange, WrongIdDtype, WrongShape

EXTREMES = [2**53 + 1, -1, 0, 2**63 - 1, -(2**63), 6221888200042590280]


@pytest.mark.case("C038")
def test_int64_ids_keep_every_digit() -> None:
    assert as_row_ids(np.array(EXTREMES)).tolist() == EXTREMES
    assert as_row_ids(torch.tensor(EXTREMES)).tolist() == EXTREMES
    assert as_row_ids(EXTREMES).tolist() == EXTREMES


@pytest.mark.case("C033")
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"])
def test_narrower_ids_are_widened_exactly(dtype: str) -> None:
    array = np.array([0, 7, np.iinfo(dtype).max if dtype != "uint64" else 2**63 - 1], dtype=dtype)
    for values in (array, torch.from_numpy(array)):
        row_ids = as_row_ids(values)
        assert row_ids.dtype == np.int64
        assert row_ids.tolist() == array.tolist()


@pytest.mark.case("C032")
@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_uint64_ids_above_int64_are_refused_with_the_way_to_map_them(value: int) -> None:
    array, tensor = np.array([1, value], np.uint64), torch.tensor([1, value], dtype=torch.uint64)
    mapped: tuple[tuple[npt.ArrayLike, str], ...] = (
        (array, "row_ids.view(np.int64)"),
        (tensor, "row_ids.view(torch.int64)"),
        ([1, value], "subtract 2**64"),
        ([-1, value], "subtract 2**64"),
        (array.astype(object), "subtract 2**64"),
    )
    for values, remedy in mapped:
        with pytest.raises(WrongIdDtype) as caught:
            as_row_ids(values)
        assert str(value) in caught.value.message
        assert remedy in caught.value.message
    assert array.view(np.int64)[1] == tensor.view(torch.int64)[1] == value - 2**64


@pytest.mark.case("C038")
@pytest.mark.case("C039")
@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.array([1.0]), "float64"),
        (np.array([1.0], np.float32), "float32"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "bfloat16"),
        (np.array([True]), "bool"),
        (torch.tensor([True]), "bool"),
        (np.array(["user_1"]), "str"),
        (["user_1"], "str"),
        ([1.5], "float64"),
        ([2**64], "18446744073709551616; hash ids outside"),
        (np.array([3, 10**30, 10**40], object), f"{10**30}; hash ids outside"),
        ([[1, -(2**63) - 1]], "-9223372036854775809; hash ids outside"),
        (np.array([1j]), "complex128"),
        (np.array([], np.float64), "float64"),
    ],
)
def test_ids_that_are_no_integers_are_refused_by_the_name_of_their_dtype(values: npt.ArrayLike, name: str) -> None:
    with pytest.raises(WrongIdDtype, match=rf"must be integers that fit int64, got {name}"):
        as_row_ids(values)


def test_an_empty_list_is_no_ids() -> None:
    row_ids = as_flat_row_ids([])
    assert row_ids.shape == (0,)
    assert row_ids.dtype == np.int64


def test_ids_may_lie_in_memory_in_any_way() -> None:
    matrix = np.arange(12).reshape(3, 4)
    assert as_row_ids(matrix.T).tolist() == matrix.T.tolist()
    assert as_row_ids(torch.from_numpy(matrix)[:, ::2]).tolist() == matrix[:, ::2].tolist()
    assert as_row_ids(np.arange(3, dtype=">i8")).tolist() == [0, 1, 2]
    assert as_row_ids(matrix[::-1, 1]).flags.c_contiguous


@pytest.mark.case("C036")
@pytest.mark.parametrize("shape", [(), (2, 3), (1, 2, 3)])
def test_table_calls_take_ids_of_one_dimension(shape: tuple[int, ...]) -> None:
    with pytest.raises(WrongShape, match=rf"must have shape \[N\], got shape \({', '.join(map(str, shape))}"):
        as_flat_row_ids(np.zeros(shape, np.int64))


@pytest.mark.case("C106")
def test_16_bit_rows_are_widened_exactly_and_float32_stays() -> None:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for tensor in (values, values.half(), values.bfloat16(), values.T, values.bfloat16()[::2], values.requires_grad_()):
        rows = as_rows(tensor, "gradients")
        assert rows.dtype == np.float32
        assert rows.flags.c_contiguous
        assert torch.equal(torch.from_numpy(rows.copy()), tensor.detach().float())
    half = np.array([[40000.0]], np.float16)
    assert as_rows(half, "gradients")[0, 0] == np.float32(half[0, 0])


@pytest.mark.case("C106")
@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.ones((1, 2)), "float64"),
        (torch.ones(1, 2, dtype=torch.float64), "float64"),
        (np.ones((1, 2), np.int32), "int32"),
        (torch.ones(1, 2, dtype=torch.complex64), "complex64"),
        (torch.ones(1, 2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (np.ones((1, 2), bool), "bool"),
    ],
)
def test_rows_of_other_dtypes_are_refused_by_name(values: npt.ArrayLike, name: str) -> None:
    with pytest.raises(BadOption, match=f"gradients must be float32, float16 or bfloat16, got {name}"):
        as_rows(values, "gradients")


def test_lists_of_numbers_are_rows_and_ragged_ones_are_refused() -> None:
    assert as_rows([[1.0, 2.5], [3.0, 4.0]], "gradients").tolist() == [[1.0, 2.5], [3.0, 4.0]]
    with pytest.raises(WrongShape, match="ragged"):
        as_rows([[1.0], [2.0, 3.0]], "gradients")
    with pytest.raises(BadOption, match="must be numbers"):
        as_rows([["a"]], "gradients")


@pytest.mark.case("C003")
def test_a_sparse_tensor_is_refused_with_its_parts_named() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3), check_invariants=True)
    with pytest.raises(BadOption, match=r"row_ids = grad\._indices\(\)\[0\]"):
        as_rows(sparse, "gradients")


def test_a_tensor_on_another_device_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadOption, match=r"row_ids is on meta; .*row_ids\.cpu\(\)"):
        as_row_ids(torch.zeros(2, dtype=torch.int64, device="meta"))


@pytest.mark.case("C004")
def test_no_ids_go_with_no_rows_of_the_dim_or_of_none() -> None:
    none = np.empty(0, np.int64)
    for shape in [(0, 4), (0, 0), (0,)]:
        assert check_rows_shape(none, np.empty(shape, np.float32), 4, "gradients").shape == (0, 4)


@pytest.mark.case("C036")
@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (12,), (3, 4, 1), (0, 0), (4, 3)])
def test_rows_that_do_not_fit_are_refused_with_both_shapes_in_order(shape: tuple[int, ...]) -> None:
    with pytest.raises(WrongShape) as caught:
        check_rows_shape(np.arange(3), np.zeros(shape, np.float32), 4, "gradients")
    expected = f"row_ids has shape (3,) and gradients has shape {shape}; gradients must have shape (3, 4)"
    assert caught.value.message == expected


@pytest.mark.case("C030")
def test_bounds_name_table_ids_and_size() -> None:
    check_bounds(np.array([0, 9]), 10, "t")
    check_bounds(np.array([2**62, -5]), None, "t")
    for row_id in (10, 11, -1, 2**40):
        with pytest.raises(IdOutOfRange) as caught:
            check_bounds(np.array([3, row_id]), 10, "t")
        assert caught.value.message == f"table 't' has num_embeddings=10, so ids are 0 to 9; got [{row_id}]"
    with pytest.raises(IdOutOfRange, match=r"got \[10, 11, 12, 13, 14, 15, 16, 17, \.\.\.\]"):
        check_bounds(np.arange(10, 30), 10, "t")
