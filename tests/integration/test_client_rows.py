"""Which rows exist and what they read as, and tables by name, through the client on a real cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

import shardam
from shardam import AdamOptions, LocalCluster, TableSpec
from shardam._parts import TableStepGradient
from shardam.errors import BadOption, IdOutOfRange, RowLimit, SchemaMismatch, UnknownTable

LR = AdamOptions(lr=0.1)
EXTREMES = np.array([2**53 + 1, -1, 2**63 - 1, -(2**63), 6221888200042590280, 0])


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=3) as local:
        yield local


@pytest.fixture(scope="module")
def one_shard() -> Iterator[LocalCluster]:
    with LocalCluster(shards=1) as local:
        yield local


@pytest.mark.case("C032")
@pytest.mark.case("C038")
def test_the_ends_of_int64_and_long_ids_are_rows_of_their_own_digit_for_digit(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("extremes", 2))
    weight = np.arange(EXTREMES.size * 2, dtype=np.float32).reshape(-1, 2)
    assert table.assign(EXTREMES, weight) == EXTREMES.size
    np.testing.assert_array_equal(table.pull(EXTREMES), weight)
    assert table.rows(EXTREMES).row_ids.tolist() == EXTREMES.tolist()
    scanned = [int(row_id) for rows in table.scan() for row_id in rows.row_ids]
    assert sorted(scanned) == sorted(EXTREMES.tolist())
    near_double = 6221888200042590208
    assert not table.rows([near_double]).found.any()


@pytest.mark.case("C033")
def test_int32_ids_are_the_same_rows_and_2_to_the_32_plus_3_is_not_row_3(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("c033", 2))
    table.push(np.array([3, 7], np.int32), np.ones((2, 2), np.float32), LR)
    table.push(np.array([2**32 + 3]), np.full((1, 2), -1.0, np.float32), LR)
    rows = table.rows([3, 7, 2**32 + 3])
    assert rows.found.all()
    np.testing.assert_array_equal(table.pull(np.array([3, 7], np.int32)), rows.weight[:2])
    assert rows.exp_avg[0, 0] > 0 > rows.exp_avg[2, 0]
    assert table.stats().num_rows == 3


@pytest.mark.case("C037")
def test_a_bounded_table_is_bounded_on_any_number_of_shards(cluster: LocalCluster, one_shard: LocalCluster) -> None:
    messages = []
    for local in (cluster, one_shard):
        table = local.create_table(TableSpec("c037", 2, num_embeddings=10))
        with pytest.raises(IdOutOfRange) as caught:
            table.push([15], np.ones((1, 2), np.float32), LR)
        messages.append(caught.value.message)
        assert table.stats().num_rows == 0
    assert messages[0] == messages[1]


@pytest.mark.case("C040")
def test_reading_never_creates_a_row(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("c040", 4))
    table.push([1], np.ones((1, 4), np.float32), LR)
    unknown = np.arange(10, 1010)
    pulled = table.pull(unknown)
    rows = table.rows(unknown)
    np.testing.assert_array_equal(rows.weight, pulled)
    assert not rows.found.any()
    assert not rows.exp_avg.any()
    assert (rows.step == 0).all()
    assert table.stats().num_rows == 1


@pytest.mark.case("C041")
@pytest.mark.parametrize(
    "init",
    [
        shardam.init.Constant(0.25),
        shardam.init.Normal(0.0, 0.05),
        shardam.init.Uniform(-2.0, 3.0),
        shardam.init.XavierUniform(),
        shardam.init.XavierNormal(),
    ],
    ids=lambda init: type(init).__name__,
)
def test_initial_weights_do_not_depend_on_shards_or_order(
    cluster: LocalCluster, one_shard: LocalCluster, init: shardam.init.Initializer
) -> None:
    spec = TableSpec(f"c041_{type(init).__name__}", 8, init=init, num_embeddings=1000, padding_idx=3)
    row_ids = np.random.default_rng(0).permutation(1000)
    three = cluster.create_table(spec).pull(row_ids)
    one = one_shard.create_table(spec).pull(np.sort(row_ids))
    np.testing.assert_array_equal(three, one[row_ids])
    assert not one[3].any()
    others = np.delete(one, 3, axis=0)
    low, high = {
        "Constant": (0.25, 0.25),
        "Normal": (-0.35, 0.35),
        "Uniform": (-2.0, 3.0),
        "XavierUniform": (-np.sqrt(6 / 1008), np.sqrt(6 / 1008)),
        "XavierNormal": (-7 * np.sqrt(2 / 1008), 7 * np.sqrt(2 / 1008)),
    }[type(init).__name__]
    assert low <= others.min() <= others.max() <= high
    assert (np.unique(others).size == 1) == isinstance(init, shardam.init.Constant)


@pytest.mark.case("C042")
def test_sixteen_threads_that_pull_new_rows_at_once_see_the_same_weights(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("c042", 8))
    sizes = [10_000, 10, 1_000, 3_333] * 4
    results: dict[int, npt.NDArray[np.float32]] = {}
    barrier = threading.Barrier(len(sizes))

    def pull(index: int) -> None:
        barrier.wait(60)
        results[index] = table.pull(np.arange(sizes[index]))

    threads = [threading.Thread(target=pull, args=(index,)) for index in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == list(range(len(sizes)))
    for index, size in enumerate(sizes):
        np.testing.assert_array_equal(results[index], results[0][:size])
    assert np.isfinite(results[0]).all()


@pytest.mark.case("C043")
def test_a_push_beyond_the_row_limit_is_refused_whole_and_the_next_works(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("c043", 4, max_rows_per_shard=20))
    known = np.arange(20)
    table.push(known, np.ones((20, 4), np.float32), LR)
    before = table.rows(known)
    with pytest.raises(RowLimit, match=r"20.*number \d+: shard 0 ROW_LIMIT, shard 1 ROW_LIMIT, shard 2 ROW_LIMIT"):
        table.push(np.arange(600), np.ones((600, 4), np.float32), LR)
    after = table.rows(known)
    np.testing.assert_array_equal(after.weight, before.weight)
    np.testing.assert_array_equal(after.step, before.step)
    assert table.stats().num_rows == 20
    assert table.push(known, np.ones((20, 4), np.float32), LR).step == 2


def test_a_push_that_one_shard_refuses_is_applied_by_the_others_and_counts_everywhere(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("partly", 4, max_rows_per_shard=5))
    row_ids = np.arange(1000)
    owners = cluster._session.route_map.shards_of(row_ids)
    push_ids = np.concatenate([row_ids[owners == 0][:6], row_ids[owners == 1][:2]])
    with pytest.raises(RowLimit, match="shard 0 ROW_LIMIT, shard 1 applied it, shard 2 applied it"):
        table.push(push_ids, np.ones((8, 4), np.float32), LR)
    assert table.rows(push_ids).found.tolist() == [False] * 6 + [True] * 2
    result = table.push(push_ids[5:], np.ones((3, 4), np.float32), LR)
    assert result.step == 2
    assert table.rows(push_ids[5:]).step.tolist() == [2, 2, 2]


@pytest.mark.case("C044")
def test_a_deleted_row_comes_back_new(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("c044", 2))
    start = table.pull([8])
    for _ in range(3):
        table.push([8, 9], np.ones((2, 2), np.float32), LR)
    assert table.delete([8, 8, 1234]) == 1
    gone = table.rows([8, 9])
    assert gone.found.tolist() == [False, True]
    np.testing.assert_array_equal(gone.weight[:1], start)
    assert not gone.exp_avg[0].any()
    table.push([8], np.ones((1, 2), np.float32), LR)
    back = table.rows([8])
    np.testing.assert_allclose(back.exp_avg, 0.1, rtol=1e-6)
    np.testing.assert_allclose(back.exp_avg_sq, 0.001, rtol=1e-6)


def test_a_scan_meets_every_row_once_in_batches_of_the_size_asked_for(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("scan", 2))
    assert list(table.scan()) == []
    row_ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    table.assign(row_ids, np.ones((1000, 2), np.float32))
    batches = list(table.scan(batch_size=64))
    assert max(map(len, batches)) == 64
    assert sorted(np.concatenate([rows.row_ids for rows in batches]).tolist()) == sorted(row_ids.tolist())
    assert all(rows.found.all() for rows in batches)
    for batch_size in (0, -1, 100_001, 1.5, True):
        with pytest.raises(BadOption, match="batch_size must be an integer from 1 to 100000"):
            table.scan(batch_size=batch_size)  # type: ignore[arg-type]  # what a caller may pass by mistake


@pytest.mark.case("C107")
def test_pulled_arrays_are_private_and_writable(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("c107", 4))
    row_ids = np.arange(100)
    first = table.pull(row_ids)
    kept = first.copy()
    first += 1.0
    np.testing.assert_array_equal(table.pull(row_ids), kept)
    rows = table.rows(row_ids)
    for column in (rows.weight, rows.exp_avg, rows.exp_avg_sq, rows.step, rows.found, rows.row_ids):
        assert column.flags.writeable
        assert column.flags.owndata


@pytest.mark.case("C046")
@pytest.mark.parametrize("name", ["a.b", "A", "a", "0", "_x-1", "n" * 128])
def test_every_allowed_name_is_a_table_of_its_own(cluster: LocalCluster, name: str) -> None:
    table = cluster.create_table(TableSpec(name, 2))
    before = table.stats().table_step
    assert cluster.table(name).push([1], np.ones((1, 2), np.float32), LR).step == before + 1
    assert cluster.table(name).info() == table.info()


@pytest.mark.case("C046")
@pytest.mark.parametrize("name", ["user/id", "ü名", "schema:Thing", "../x", "n" * 129, "n" * 200, "", ".a", "-a", "a b"])
def test_other_names_are_refused_with_the_alphabet(name: str) -> None:
    with pytest.raises(BadOption, match=r"use 1 to 128 characters of A-Z a-z 0-9 _ \. -"):
        TableSpec(name, 2)


@pytest.mark.case("C047")
def test_the_same_schema_again_is_a_no_op_and_another_is_refused_with_both(cluster: LocalCluster) -> None:
    spec = TableSpec("c047", 8)
    tables: list[shardam.TableInfo] = []
    barrier = threading.Barrier(4)

    def create() -> None:
        with shardam.connect(cluster.redis_url) as client:
            barrier.wait(60)
            tables.append(client.create_table(spec).info())

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(tables) == 4
    assert len({info.table_id for info in tables}) == 1
    with pytest.raises(SchemaMismatch) as caught:
        cluster.create_table(TableSpec("c047", 16))
    assert "8" in caught.value.message
    assert "16" in caught.value.message
    assert cluster.table("c047").spec == spec


def test_an_unknown_table_is_named_with_its_near_names(cluster: LocalCluster) -> None:
    cluster.create_tables([TableSpec("movies", 4), TableSpec("users", 4)])
    with pytest.raises(UnknownTable, match=r"no table 'movie'; near names: 'movies'"):
        cluster.table("movie")
    with pytest.raises(UnknownTable, match=r"the cluster has \d+ tables"):
        cluster.table("zzzzzzzzzzzz")


def test_a_push_of_20_mb_works_with_default_settings(cluster: LocalCluster) -> None:
    table = cluster.create_table(TableSpec("large", 64, init=shardam.init.Constant(1.0)))
    row_ids = np.random.default_rng(0).permutation(80_000)
    gradients = np.random.default_rng(1).standard_normal((80_000, 64)).astype(np.float32)
    assert table.push(row_ids, gradients, LR).step == 1
    rows = table.rows(row_ids)
    assert rows.found.all()
    np.testing.assert_allclose(rows.exp_avg, np.float32(0.1) * gradients, rtol=1e-6)
    np.testing.assert_array_equal(table.pull(row_ids), rows.weight)
    assert sum(map(len, table.scan())) == 80_000


@pytest.mark.case("C045")
def test_five_thousand_tables_are_created_and_stepped_at_once(one_shard: LocalCluster) -> None:
    specs = [TableSpec(f"many_{index:04d}", 8, num_embeddings=10) for index in range(5000)]
    tables = one_shard.create_tables(specs)
    assert [table.name for table in tables] == [spec.name for spec in specs]
    listed = {info.name for info in one_shard.tables()}
    assert {spec.name for spec in specs} <= listed
    row_ids, rows = np.arange(3), np.ones((3, 8), np.float32)
    steps = [TableStepGradient(table.name, table.info().table_id, row_ids, rows, LR) for table in tables]
    one_shard._queue_push(steps)
    for table in (tables[0], tables[2500], tables[-1]):
        assert table.stats().table_step == 1
        np.testing.assert_allclose(table.rows(row_ids).exp_avg, 0.1, rtol=1e-6)
