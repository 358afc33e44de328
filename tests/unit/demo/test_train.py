"""The demo's batches, model and training loop, without a cluster."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shardam.demo.baseline import Baseline, vocabularies
from shardam.demo.data_synthetic import make_synthetic
from shardam.demo.model import DIM, DenseTower, LocalFields
from shardam.demo.train import Share, choose_batch_size
from shardam_proto.errors import BadOption


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_workers_shares_of_a_batch_are_together_the_baseline_s_batch(workers: int) -> None:
    batch_size = choose_batch_size(1_000, workers)
    whole = list(Share(0, 1, batch_size).batches(1_000, seed=4, epoch=2))
    parts = [list(Share(rank, workers, batch_size).batches(1_000, seed=4, epoch=2)) for rank in range(workers)]
    assert len(whole) == 1_000 // batch_size
    for number, batch in enumerate(whole):
        shares = [mine[number] for mine in parts]
        assert {len(share) for share in shares} == {batch_size // workers}
        assert torch.equal(torch.cat(shares), batch)
    assert len(torch.cat(whole).unique()) == len(whole) * batch_size


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = [torch.cat(list(Share(0, 1, 10).batches(100, seed, epoch))).tolist() for seed, epoch in ((0, 1), (0, 2), (1, 1))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert orders[0] == torch.cat(list(Share(0, 1, 10).batches(100, 0, 1))).tolist()


@pytest.mark.parametrize(("num_train", "workers", "expected"), [(90_000, 2, 512), (90_000, 3, 510), (100, 3, 99), (7, 7, 7)])
def test_a_batch_is_the_largest_multiple_of_the_workers(num_train: int, workers: int, expected: int) -> None:
    assert choose_batch_size(num_train, workers) == expected


def test_more_workers_than_samples_are_refused_with_the_remedy() -> None:
    with pytest.raises(BadOption, match=r"8 workers cannot share a batch of 7 samples: use fewer --workers"):
        choose_batch_size(7, 8)


@pytest.mark.parametrize("num_dense", [0, 3])
def test_the_tower_sees_each_pair_s_dot_product_once(num_dense: int) -> None:
    torch.manual_seed(0)
    tower = DenseTower(4, num_dense)
    embedded, dense = torch.randn(5, 4, DIM), torch.randn(5, num_dense)
    vectors = embedded
    if tower.bottom is not None:
        vectors = torch.cat([torch.relu(tower.bottom(dense))[:, None], embedded], dim=1)
    count = vectors.shape[1]
    products = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(count) for j in range(i + 1, count)]
    expected = tower.top(torch.cat([vectors.reshape(5, -1), torch.stack(products, 1)], dim=1))[:, 0]
    torch.testing.assert_close(tower(embedded, dense), expected)


def test_a_vocabulary_and_places_give_the_raw_ids_back() -> None:
    data = make_synthetic(0, 200)
    known, places = vocabularies(data)
    for field in range(len(data.fields)):
        np.testing.assert_array_equal(known[field][places[:, field]], data.row_ids[:, field])


def test_the_baseline_s_rows_are_those_that_it_is_given() -> None:
    rows = [np.arange(3 * DIM, dtype=np.float32).reshape(3, DIM), np.full((5, DIM), 7.0, dtype=np.float32)]
    embedded = LocalFields(rows)(torch.tensor([[2, 4], [0, 1]]))
    np.testing.assert_array_equal(embedded.detach().numpy(), np.stack([rows[0][[2, 0]], rows[1][[4, 1]]], axis=1))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a worker: OpenMP's spinning threads are slow where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_baseline_learns(capsys: pytest.CaptureFixture[str]) -> None:
    data = make_synthetic(0, 4_000)
    known, places = vocabularies(data)
    random = np.random.default_rng(0)
    rows = [random.normal(0, 0.05, (len(ids), DIM)).astype(np.float32) for ids in known]
    torch.manual_seed(0)
    baseline = Baseline(data, places, rows, DenseTower(len(data.fields), data.dense.shape[1]))
    results = [baseline.run_epoch(epoch, seed=0, batch_size=64) for epoch in (1, 2, 3)]
    assert results[-1][0] > 0.65
    assert results[-1][1] < results[0][1]
    assert baseline.throughput.samples == 3 * (data.num_train // 64 * 64)
    assert capsys.readouterr().out.count('"part": "baseline"') >= 3
