"""EmbeddingBag beside torch.nn.EmbeddingBag: the same bits forward and backward, and what it refuses, on a real cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from shardam import EmbeddingBag, LocalCluster, SparseAdam
from shardam.embedding_bag import Mode
from shardam.errors import BadOption, IdOutOfRange, WrongIdDtype, WrongShape

ROWS, DIM = 40, 32
ODD_DIM = 33  # off every vector width
_names = (f"bag_{index}" for index in itertools.count())

Inputs = tuple[torch.Tensor, torch.Tensor | None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


def pair(
    cluster: LocalCluster,
    mode: Mode = "mean",
    *,
    dim: int = DIM,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[nn.EmbeddingBag, EmbeddingBag]:
    """A local bag and one on shards with the same rows."""
    torch.manual_seed(0)
    local = nn.EmbeddingBag(ROWS, dim, mode=mode, include_last_offset=include_last_offset, padding_idx=padding_idx)
    remote = EmbeddingBag(
        ROWS,
        dim,
        mode=mode,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
        table=next(_names),
        cluster=cluster,
    )
    remote.table.assign(range(ROWS), local.weight)
    return local, remote


def inputs(kind: str, include_last_offset: bool) -> Inputs:
    """Bags with duplicates, empty ones in the middle and at the end; padding_idx 3 is among the ids, -1 is not."""
    generator = torch.Generator().manual_seed(1)
    if kind == "matrix":
        return torch.randint(0, ROWS - 1, (6, 7), generator=generator), None
    ids = torch.randint(0, ROWS - 1, (30,), generator=generator)
    ids[:4] = torch.tensor([3, 5, 3, 3])
    return ids, torch.tensor([0, 4, 4, 11, 30, 30][: None if include_last_offset else 5])


def gradient_rows(remote: EmbeddingBag, sparse: SparseAdam) -> tuple[torch.Tensor, torch.Tensor]:
    (proxy,) = sparse.parameters()
    row_ids = remote._gradient.row_ids
    assert proxy.grad is not None
    assert row_ids is not None
    return row_ids, proxy.grad


@pytest.mark.parametrize("dim", [DIM, ODD_DIM])
@pytest.mark.parametrize("kind", ["matrix", "offsets"])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize(("mode", "weighted"), [("mean", False), ("sum", False), ("sum", True), ("max", False)])
def test_output_and_gradients_have_torchs_bits(
    cluster: LocalCluster, mode: Mode, weighted: bool, padding_idx: int | None, include_last_offset: bool, kind: str, dim: int
) -> None:
    local, remote = pair(cluster, mode, dim=dim, include_last_offset=include_last_offset, padding_idx=padding_idx)
    sparse = SparseAdam([remote], lr=0.1)
    ids, offsets = inputs(kind, include_last_offset)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(2)) if weighted else None
    local_weights = weights.clone().requires_grad_() if weights is not None else None
    remote_weights = weights.clone().requires_grad_() if weights is not None else None
    expected, found = local(ids, offsets, local_weights), remote(ids, offsets, remote_weights)
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(remote(ids, offsets, weights), local(ids, offsets, weights))
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(upstream)
    found.backward(upstream)
    if local_weights is not None and remote_weights is not None:
        assert local_weights.grad is not None
        assert remote_weights.grad is not None
        # torch's dot product depends on where a row lies: its own bits differ between copies whose rows are not on 16 bytes
        tolerance = 0.0 if dim == DIM else 1e-6
        torch.testing.assert_close(remote_weights.grad, local_weights.grad, rtol=tolerance, atol=10 * tolerance)
    row_ids, gradient = gradient_rows(remote, sparse)
    assert local.weight.grad is not None
    assert torch.equal(gradient, local.weight.grad[row_ids])
    rest = np.setdiff1d(np.arange(ROWS), row_ids.numpy())
    assert not local.weight.grad[torch.from_numpy(rest)].any()


def test_a_training_run_follows_torch_step_by_step(cluster: LocalCluster) -> None:
    torch.manual_seed(0)
    local = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, padding_idx=3)
    _, remote = pair(cluster, "sum", padding_idx=3)
    remote.table.assign(range(ROWS), local.weight)
    local_adam, sparse = torch.optim.SparseAdam(local.parameters(), lr=0.1), SparseAdam([remote], lr=0.1)
    ids, offsets = inputs("offsets", include_last_offset=False)
    for _ in range(5):
        for module, optimizer in ((local, local_adam), (remote, sparse)):
            module(ids, offsets).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(torch.from_numpy(remote.table.pull(range(ROWS))), local.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.case("C004")
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_bags_without_ids_are_zeros_and_a_step(cluster: LocalCluster, mode: Mode) -> None:
    _, remote = pair(cluster, mode)
    sparse = SparseAdam([remote], lr=0.1)
    none = torch.empty(0, dtype=torch.int64)
    for ids, offsets, bags in (
        (none, [0, 0, 0], 3),
        (none, [], 0),
        (none.reshape(4, 0), None, 4),
        (none.reshape(0, 4), None, 0),
    ):
        output = remote(ids, offsets)
        assert output.shape == (bags, DIM)
        assert not output.any()
        output.sum().backward()
    sparse.step()
    assert remote.table.stats().table_step == 1


@pytest.mark.case("C006")
def test_bags_of_padding_only_are_zeros_and_change_no_row(cluster: LocalCluster) -> None:
    _, remote = pair(cluster, padding_idx=3)
    sparse = SparseAdam([remote], lr=0.1)
    before = remote.table.rows(range(ROWS))
    output = remote(torch.tensor([[3, 3], [3, 3]]))
    assert not output.any()
    output.sum().backward()
    sparse.step()
    after = remote.table.rows(range(ROWS))
    for column in ("weight", "exp_avg", "exp_avg_sq"):
        np.testing.assert_array_equal(getattr(after, column), getattr(before, column))


@pytest.mark.case("C033")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_ids_and_offsets_and_unbounded_tables_work(cluster: LocalCluster, dtype: torch.dtype) -> None:
    unbounded = EmbeddingBag(None, 4, mode="sum", table=next(_names), cluster=cluster)
    ids, offsets = torch.tensor([7, 7, 300]), torch.tensor([0, 2])
    with torch.no_grad():
        wide = unbounded(ids, offsets)
        assert torch.equal(unbounded(ids.to(dtype), offsets.to(dtype)), wide)
        assert torch.equal(unbounded(ids.tolist(), offsets.tolist()), wide)
    rows = torch.from_numpy(unbounded.table.pull([7, 300]))
    assert torch.equal(wide, torch.stack([rows[0] + rows[0], rows[1]]))


def test_16_bit_weights_are_widened_and_their_gradient_is_of_their_dtype(cluster: LocalCluster) -> None:
    _, remote = pair(cluster, "sum")
    weights = torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    sparse = SparseAdam([remote])
    remote(torch.tensor([1, 2]), [0], weights).sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == torch.bfloat16
    del sparse


@pytest.mark.case("C036")
@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1, 2, 3], None, r"shape \(3,\) and offsets is missing; say where each bag starts"),
        ([1, 2, 3], [1, 2], "offsets must start with 0"),
        ([1, 2, 3], [0, 2, 1], "never decrease"),
        ([1, 2, 3], [0, -1], "never decrease"),
        ([1, 2, 3], [0, 4], "not exceed the number of ids, 3"),
        ([1, 2, 3], [], "3 ids and no offsets"),
        ([1, 2, 3], [[0, 1]], r"offsets must have shape \[N\]"),
        ([[1, 2], [3, 4]], [0, 2], "leave offsets out"),
        ([[[1]]], None, r"\[N\] with offsets, or \[B, L\], got shape \(1, 1, 1\)"),
    ],
)
def test_bags_that_fit_no_ids_are_refused_with_both(
    cluster: LocalCluster, ids: list[object], offsets: list[object] | None, message: str
) -> None:
    _, remote = pair(cluster)
    with torch.no_grad(), pytest.raises(WrongShape, match=message):
        remote(torch.tensor(ids), None if offsets is None else torch.tensor(offsets, dtype=torch.int64))


@pytest.mark.case("C036")
@pytest.mark.parametrize("offsets", [[0, 2], [0], []])
def test_with_the_last_offset_included_it_must_be_the_number_of_ids(cluster: LocalCluster, offsets: list[int]) -> None:
    _, remote = pair(cluster, include_last_offset=True)
    with torch.no_grad(), pytest.raises(WrongShape, match=r"the number of ids, 3|3 ids and no offsets"):
        remote(torch.tensor([1, 2, 3]), torch.tensor(offsets, dtype=torch.int64))


def test_weights_that_fit_no_ids_or_no_mode_are_refused(cluster: LocalCluster) -> None:
    _, summed = pair(cluster, "sum")
    _, averaged = pair(cluster)
    ids = torch.tensor([1, 2, 3])
    with torch.no_grad():
        for weights in (torch.ones(2), torch.ones(4), torch.ones(3, 1), torch.ones(0)):
            with pytest.raises(WrongShape, match=r"row_ids has shape \(3,\); each id needs one"):
                summed(ids, [0], weights)
        with pytest.raises(BadOption, match="must be a tensor of one of"):
            summed(ids, [0], torch.ones(3, dtype=torch.float64))
        with pytest.raises(BadOption, match="go with mode='sum' only, this one has mode='mean'"):
            averaged(ids, [0], torch.ones(3))


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("max_norm", 1.0, "clip with"),
        ("norm_type", 1.0, "only matters with max_norm"),
        ("scale_grad_by_freq", True, "scale the loss"),
        ("sparse", False, "always sparse"),
        ("_weight", torch.zeros(10, 4), "from_pretrained writes them"),
        ("mode", "median", "mode must be one of"),
        ("include_last_offset", 1, "must be a bool"),
        ("output_dtype", torch.float64, "must be one of"),
    ],
)
def test_arguments_that_are_not_supported_are_refused_with_the_remedy(
    cluster: LocalCluster, argument: str, value: object, remedy: str
) -> None:
    name = next(_names)
    arguments: dict[str, object] = {"table": name, "cluster": cluster, argument: value}
    with pytest.raises(BadOption, match=remedy):
        EmbeddingBag(10, 4, **arguments)  # type: ignore[arg-type]  # what a caller may pass by mistake
    assert name not in {info.name for info in cluster.tables()}


def test_ids_are_checked_as_everywhere_and_torchs_argument_order_holds(cluster: LocalCluster) -> None:
    bag = EmbeddingBag(10, 4, None, 2.0, False, "sum", True, None, True, 2, table=next(_names), cluster=cluster)
    assert (bag.mode, bag.include_last_offset, bag.padding_idx) == ("sum", True, 2)
    assert f"10, 4, mode='sum', include_last_offset=True, padding_idx=2, table='{bag.table.name}'" in repr(bag)
    with torch.no_grad():
        with pytest.raises(WrongIdDtype):
            bag(torch.tensor([1.0]), [0, 1])
        with pytest.raises(WrongIdDtype):
            bag(torch.tensor([1]), torch.tensor([0.0, 1.0]))
        with pytest.raises(IdOutOfRange):
            bag(torch.tensor([[10]]))
    with pytest.raises(BadOption, match="no SparseAdam has it"):
        bag(torch.tensor([[1]]))
