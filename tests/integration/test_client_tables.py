"""Tables through the client on a real cluster: arithmetic, refusals, rows and ids, without torch modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

import shardam
from shardam import AdamOptions, LocalCluster, Rows, Table, TableSpec
from shardam.errors import (
    BadOption,
    IdOutOfRange,
    NonFiniteGradient,
    NonFiniteState,
    WrongIdDtype,
    WrongShape,
)

LR = AdamOptions(lr=0.1)
EXTREMES = np.array([2**53 + 1, -1, 2**63 - 1, -(2**63), 6221888200042590280, 0])


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def zero_table(cluster: LocalCluster, name: str, dim: int = 1, num_embeddings: int | None = None) -> Table:
    spec = TableSpec(name, dim, init=shardam.init.Constant(0.0), num_embeddings=num_embeddings)
    return cluster.create_table(spec)


def state(rows: Rows) -> list[npt.NDArray[np.generic]]:
    return [rows.row_ids, rows.weight, rows.exp_avg, rows.exp_avg_sq, rows.step, rows.found]


def assert_same_bits(first: Rows, second: Rows) -> None:
    for one, other in zip(state(first), state(second), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.case("C001")
def test_duplicate_ids_are_one_summed_gradient(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c001")
    table.assign([5], [[1.0]])
    assert table.push([5, 5], [[1.0], [3.0]], LR).step == 1
    first = table.rows([5])
    np.testing.assert_allclose(
        [first.weight[0, 0], first.exp_avg[0, 0], first.exp_avg_sq[0, 0]], [0.9000000079, 0.4, 0.016], rtol=1e-6
    )
    assert table.push([5], [[-1.0]], LR).step == 2
    second = table.rows([5])
    np.testing.assert_allclose(
        [second.weight[0, 0], second.exp_avg[0, 0], second.exp_avg_sq[0, 0]], [0.8530531944, 0.26, 0.016984], rtol=1e-6
    )


@pytest.mark.case("C003")
def test_uncoalesced_and_coalesced_gradients_leave_the_same_bits(cluster: LocalCluster) -> None:
    local = torch.nn.Embedding(10, 4, sparse=True)
    (local(torch.tensor([3, 3, 1])) * torch.randn(3, 4)).sum().backward()
    gradient = local.weight.grad
    assert gradient is not None
    assert not gradient.is_coalesced()
    tables = [cluster.create_table(TableSpec(name, 4, num_embeddings=10)) for name in ("c003_raw", "c003_coalesced")]
    for table, sparse in zip(tables, (gradient, gradient.coalesce()), strict=True):
        table.assign(range(10), local.weight)
        table.push(sparse._indices()[0], sparse._values(), LR)
    assert_same_bits(tables[0].rows(range(10)), tables[1].rows(range(10)))


@pytest.mark.case("C004")
def test_no_ids_are_a_step_that_changes_no_row(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c004", dim=3)
    table.push([7], [[1.0, 2.0, 3.0]], LR)
    before = table.rows([7])
    none = np.empty(0, np.int64)
    assert table.push(none, np.empty((0, 3), np.float32), LR).step == 2
    assert table.push(none, np.empty((0, 0), np.float32), LR).step == 3
    after = table.rows([7])
    np.testing.assert_array_equal(after.weight, before.weight)
    np.testing.assert_array_equal(after.exp_avg, before.exp_avg)
    pulled = table.pull(none)
    assert pulled.shape == (0, 3)
    assert pulled.dtype == np.float32
    assert len(table.rows(none)) == 0
    assert table.delete(none) == 0
    assert table.assign(none, np.empty((0, 3), np.float32)) == 0


@pytest.mark.case("C006")
def test_a_batch_of_padding_only_and_another_workers_batch_both_apply(cluster: LocalCluster) -> None:
    spec = TableSpec("c006", 2, init=shardam.init.Constant(1.0), num_embeddings=10, padding_idx=0)
    first = cluster.create_table(spec)
    with shardam.connect(cluster.redis_url) as other:
        second = other.table("c006")
        ones = np.ones((2, 2), np.float32)
        assert first.push([0, 0], ones, LR).number > 0
        second.push([1, 2], ones, LR)
    rows = first.rows([0, 1, 2])
    assert not rows.weight[0].any()
    assert not rows.exp_avg[0].any()
    assert not rows.exp_avg_sq[0].any()
    np.testing.assert_allclose(rows.exp_avg[1:], 0.1, rtol=1e-6)


@pytest.mark.case("C007")
@pytest.mark.parametrize(("padding_idx", "padding_row"), [(0, 0), (-2, 8)])
def test_the_padding_row_stays_zero_for_ever(cluster: LocalCluster, padding_idx: int, padding_row: int) -> None:
    spec = TableSpec(f"c007_{padding_row}", 2, num_embeddings=10, padding_idx=padding_idx)
    table = cluster.create_table(spec)
    assert table.spec.padding_idx == padding_row
    for _ in range(100):
        table.push([padding_row, 4, padding_row], np.ones((3, 2), np.float32), LR)
    rows = table.rows([padding_row, 4])
    for column in (rows.weight, rows.exp_avg, rows.exp_avg_sq):
        assert not column[0].any()
        assert column[1].all()
    assert rows.step[1] == 100


@pytest.mark.case("C009")
def test_a_row_unseen_for_99_steps_keeps_its_moments_as_torch_does(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c009")
    one = np.ones((1, 1), np.float32)
    for step in range(1, 102):
        table.push([1] if step in (1, 101) else [2], one, LR)
    rows = table.rows([1])
    values = [rows.weight[0, 0], rows.exp_avg[0, 0], rows.exp_avg_sq[0, 0]]
    np.testing.assert_allclose(values, [-0.2317490976, 0.19, 0.001999], rtol=1e-5)


@pytest.mark.case("C013")
def test_eight_clients_that_push_the_same_new_ids_never_write_nan_and_each_push_counts(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c013", dim=4)
    rounds, clients = 25, [shardam.connect(cluster.redis_url) for _ in range(8)]
    barrier, problems = threading.Barrier(len(clients)), []

    def work(index: int) -> None:
        try:
            mine = clients[index].table("c013")
            for number in range(rounds):
                row_ids = np.arange(number * 50, (number + 1) * 50)
                barrier.wait(60)
                mine.push(row_ids, np.ones((50, 4), np.float32), LR)
                seen = mine.rows(row_ids)
                moved = (seen.exp_avg != 0).any(axis=1) | (seen.exp_avg_sq != 0).any(axis=1)
                assert (seen.step[moved] >= 1).all()
                assert np.isfinite(seen.weight).all()
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            problems.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for client in clients:
        client.close()
    assert problems == []
    rows = table.rows(np.arange(rounds * 50))
    assert rows.found.all()
    assert np.isfinite(rows.weight).all()
    assert (rows.step == rounds * len(clients)).all()


@pytest.mark.case("C019")
@pytest.mark.parametrize(
    ("name", "bad"), [("nan", np.nan), ("inf", np.inf), ("minus_inf", -np.inf), ("large", 2.0**64), ("minus_large", -(2.0**64))]
)
def test_a_push_with_a_value_that_is_not_finite_is_refused_whole(cluster: LocalCluster, name: str, bad: float) -> None:
    table = zero_table(cluster, f"c019_{name}")
    for _ in range(4):
        table.push([1, 2], [[1.0], [2.0]], LR)
    before = table.rows([1, 2])
    with pytest.raises(NonFiniteGradient, match=rf"table '{table.name}'.*ids \[2\]"):
        table.push([1, 2], np.array([[1.0], [bad]], np.float32), LR)
    assert_same_bits(table.rows([1, 2]), before)
    assert table.push([1, 2], [[1.0], [1.0]], LR).step == 5


@pytest.mark.case("C019")
def test_two_finite_values_whose_sum_is_too_large_are_refused(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c019_sum")
    with pytest.raises(NonFiniteGradient):
        table.push([1, 1], np.array([[2.0**63], [2.0**63]], np.float32), LR)
    table.push([1, 1], np.array([[2.0**63], [2.0**63]], np.float32), LR, grad_scale=4.0)
    assert table.stats().table_step == 1


@pytest.mark.case("C020")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_summed_and_unscaled_in_float32(cluster: LocalCluster, dtype: torch.dtype) -> None:
    table = zero_table(cluster, f"c020_{str(dtype).removeprefix('torch.')}")
    gradients = torch.tensor([[40000.0], [40000.0]], dtype=dtype)
    table.push([3, 3], gradients, LR, grad_scale=1024.0)
    expected = 2 * float(gradients[0, 0].float()) / 1024
    np.testing.assert_allclose(table.rows([3]).exp_avg, [[0.1 * expected]], rtol=1e-6)


@pytest.mark.case("C015")
@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_acts_on_the_rows_of_the_push_by_its_formula(cluster: LocalCluster, decoupled: bool) -> None:
    table = zero_table(cluster, f"c015_{decoupled}")
    table.assign([1, 2], [[2.0], [2.0]])
    options = AdamOptions(lr=0.1, weight_decay=0.01, decoupled_weight_decay=decoupled)
    table.push([1], [[1.0]], options)
    rows = table.rows([1, 2])
    gradient = 1.0 if decoupled else 1.0 + 0.01 * 2.0
    start = 2.0 * (1 - 0.1 * 0.01) if decoupled else 2.0
    np.testing.assert_allclose(rows.exp_avg[0, 0], 0.1 * gradient, rtol=1e-6)
    np.testing.assert_allclose(rows.weight[0, 0], start - 0.1, rtol=1e-5)
    assert rows.weight[1, 0] == 2.0


@pytest.mark.case("C030")
def test_an_id_outside_a_bounded_table_refuses_the_whole_push(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c030", num_embeddings=10)
    table.push([9, 3], [[1.0], [1.0]], LR)
    before = table.rows(range(10))
    for row_id in (10, 11, -1, 2**40):
        for call in (
            lambda row_id=row_id: table.push([3, row_id], [[1.0], [1.0]], LR),
            lambda row_id=row_id: table.pull([3, row_id]),
            lambda row_id=row_id: table.rows([row_id]),
            lambda row_id=row_id: table.assign([3, row_id], [[1.0], [1.0]]),
            lambda row_id=row_id: table.delete([3, row_id]),
        ):
            with pytest.raises(IdOutOfRange, match=rf"'c030' has num_embeddings=10.*{row_id}"):
                call()
    assert_same_bits(table.rows(range(10)), before)


@pytest.mark.case("C024")
def test_a_dense_gradient_of_the_whole_table_is_refused_with_what_is_expected(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "c024", dim=4, num_embeddings=10)
    dense = torch.ones(10, 4)
    for row_ids in ([1, 2], dense):
        with pytest.raises(WrongShape, match=r"sparse=True and hand in grad\._indices\(\)\[0\] and grad\._values\(\)"):
            table.push(row_ids, dense, LR)
    assert table.stats().table_step == 0


BAD_PUSHES = [
    ([1, 2, 3], np.ones((2, 4), np.float32), LR, WrongShape),
    ([1, 2, 3], np.ones((3, 5), np.float32), LR, WrongShape),
    ([1, 2, 3], np.ones(12, np.float32), LR, WrongShape),
    ([[[1]]], np.ones((1, 4), np.float32), LR, WrongShape),
    (np.array([1.0]), np.ones((1, 4), np.float32), LR, WrongIdDtype),
    (["user_1"], np.ones((1, 4), np.float32), LR, WrongIdDtype),
    ([1], np.ones((1, 4)), LR, BadOption),
    ([1], np.ones((1, 4), np.int64), LR, BadOption),
    ([1], np.ones((1, 4), np.float32), AdamOptions(lr=-0.1), BadOption),
    ([1], np.ones((1, 4), np.float32), AdamOptions(lr=float("nan")), BadOption),
    ([1], np.ones((1, 4), np.float32), AdamOptions(betas=(0.9, 1.0)), BadOption),
    ([1], np.ones((1, 4), np.float32), AdamOptions(eps=0.0), BadOption),
    ([1], np.ones((1, 4), np.float32), AdamOptions(weight_decay=-1.0), BadOption),
    ([1], np.ones((1, 4), np.float32), 0.1, BadOption),
]


@pytest.mark.case("C036")
@pytest.mark.case("C039")
@pytest.mark.parametrize(("row_ids", "gradients", "options", "error"), BAD_PUSHES)
def test_bad_input_is_refused_and_nothing_changes(
    cluster: LocalCluster,
    row_ids: npt.ArrayLike,
    gradients: npt.NDArray[np.generic],
    options: AdamOptions,
    error: type[Exception],
) -> None:
    table = cluster.create_table(TableSpec("bad_input", 4))
    table.push([1, 2, 3], np.ones((3, 4), np.float32), LR)
    before, stats = table.rows([1, 2, 3]), table.stats()
    with pytest.raises(error):
        table.push(row_ids, gradients, options)
    assert_same_bits(table.rows([1, 2, 3]), before)
    assert table.stats() == stats


def test_assign_refuses_what_is_no_state_of_a_row(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "assign", dim=2)
    good = np.ones((2, 2), np.float32)
    assert table.assign([1, 2], good, exp_avg=-good, exp_avg_sq=good) == 2
    before = table.rows([1, 2])
    bad = np.array([[1.0, np.inf], [1.0, 1.0]], np.float32)
    with pytest.raises(NonFiniteState, match=r"weight must be finite; it is not for ids \[1\]"):
        table.assign([1, 2], bad)
    with pytest.raises(NonFiniteState, match=r"exp_avg_sq must be finite and not negative"):
        table.assign([1, 2], good, exp_avg_sq=-good)
    with pytest.raises(WrongShape, match=r"ids \[1\] are named twice"):
        table.assign([1, 1], good)
    with pytest.raises(WrongShape):
        table.assign([1, 2], good[:1])
    with pytest.raises(BadOption, match=r"if_absent must be True or False, got 'no'"):
        table.assign([1, 2], 3 * good, if_absent="no")  # type: ignore[arg-type]  # what a caller may pass by mistake
    assert_same_bits(table.rows([1, 2]), before)
    assert table.assign([2, 3], 5 * good, if_absent=True) == 1
    rows = table.rows([2, 3])
    assert rows.weight.tolist() == [[1.0, 1.0], [5.0, 5.0]]
    assert rows.exp_avg.tolist() == [[-1.0, -1.0], [0.0, 0.0]]
    assert table.assign([2], good[:1] * 7) == 1
    assert table.rows([2]).exp_avg.tolist() == [[-1.0, -1.0]]


def test_no_ids_and_no_gradients_as_empty_lists_are_a_step(cluster: LocalCluster) -> None:
    table = zero_table(cluster, "empty_lists", dim=2)
    assert [table.push([], [], LR).step, table.push([], np.empty(0, np.float32), LR).step] == [1, 2]
