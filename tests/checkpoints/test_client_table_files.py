"""Tables out to files and in again on a real cluster: the same rows, the same next step, and refusals that change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardam
from shardam import AdamOptions, LocalCluster, Rows, Table, TableSpec
from shardam.errors import (
    BadOption,
    CheckpointDamaged,
    CheckpointMismatch,
    NonFiniteState,
    SchemaMismatch,
    ShardamError,
    WrongShape,
)
from shardam_proto.schema import DtypeName, StepModeName
from shardam_proto.table_files import TableFile

LR = AdamOptions(lr=0.1)
_names = (f"filed_{index}" for index in itertools.count())

suffixes = pytest.mark.parametrize("suffix", [".npz", ".safetensors"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(shards=2) as local:
        yield local


@pytest.fixture(scope="module")
def other() -> Iterator[LocalCluster]:
    """A cluster of another seed and number of shards."""
    with LocalCluster(shards=3, seed=7) as local:
        yield local


def trained(
    cluster: LocalCluster, step: StepModeName = "table", dtype: DtypeName = "float32", num_embeddings: int | None = None
) -> Table:
    """Returns a table after ten steps on changing rows."""
    table = cluster.create_table(TableSpec(next(_names), 5, dtype, num_embeddings=num_embeddings, step=step))
    random = np.random.default_rng(3)
    for _ in range(10):
        table.push(random.integers(0, 200, 60), random.standard_normal((60, 5)).astype(np.float32), LR)
    return table


def sorted_rows(table: Table) -> Rows:
    ids = np.sort(np.concatenate([np.empty(0, np.int64), *(rows.row_ids for rows in table.scan())]))
    return table.rows(ids)


def assert_same(one: Table, other: Table) -> None:
    first, second = sorted_rows(one), sorted_rows(other)
    for column in ("row_ids", "weight", "exp_avg", "exp_avg_sq", "step", "found"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column))
    assert one.stats().table_step == other.stats().table_step


def push_once_more(*tables: Table) -> None:
    random = np.random.default_rng(11)
    ids, rows = random.integers(0, 200, 60), random.standard_normal((60, 5)).astype(np.float32)
    for table in tables:
        table.push(ids, rows, LR)


@suffixes
@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_imported_table_takes_the_same_next_step(
    cluster: LocalCluster, other: LocalCluster, tmp_path: Path, suffix: str, step: StepModeName, dtype: DtypeName
) -> None:
    table = trained(cluster, step, dtype)
    written = table.export(tmp_path / f"items{suffix}")
    assert (written.num_rows, written.table_step, written.one_moment) == (len(sorted_rows(table)), 10, True)
    assert written.size_bytes == written.path.stat().st_size
    report = other.import_table(written.path)
    assert (report.table, report.num_rows, report.created, report.moments) == (table.name, written.num_rows, True, True)
    assert (report.table_step, report.options, report.same_initial_rows) == (10, LR, True)
    copied = other.table(table.name)
    assert_same(table, copied)
    known = sorted_rows(table).row_ids[:40]
    for target in (table, copied):
        target.push(known, np.full((known.size, 5), 0.25, np.float32), LR)
    assert_same(table, copied)


@pytest.mark.case("C066")
@pytest.mark.case("C067")
@suffixes
def test_ten_steps_a_file_and_the_eleventh_are_eleven_steps(cluster: LocalCluster, tmp_path: Path, suffix: str) -> None:
    whole, saved = (cluster.create_table(TableSpec(next(_names), 1, init=shardam.init.Constant(0.0))) for _ in range(2))
    for step in range(1, 11):
        for table in (whole, saved):
            table.push([1], [[1.0 if step % 2 else -0.5]], LR)
    path = saved.export(tmp_path / f"saved{suffix}").path
    resumed, weights_only = next(_names), next(_names)
    cluster.import_table(path, resumed)
    report = cluster.import_table(path, weights_only, weights_only=True)
    assert (report.moments, report.table_step, report.num_rows) == (False, 0, 1)
    found = {}
    for name in (whole.name, resumed, weights_only):
        table = cluster.table(name)
        table.push([1], [[1.0]], LR)
        found[name] = table.rows([1])
    for name in (whole.name, resumed):
        rows = found[name]
        values = [rows.weight[0, 0], rows.exp_avg[0, 0], rows.exp_avg_sq[0, 0]]
        np.testing.assert_allclose(values, [-0.4649203866, 0.2234082956, 0.0072138623], rtol=1e-6)
        assert rows.step[0] == 11
    assert found[whole.name].weight == found[resumed].weight
    np.testing.assert_allclose(found[weights_only].weight, -0.5248168377, rtol=1e-6)
    assert found[weights_only].step[0] == 1


@suffixes
def test_an_empty_table_and_one_with_steps_alone_come_back(
    cluster: LocalCluster, other: LocalCluster, tmp_path: Path, suffix: str
) -> None:
    for pushes in (0, 2):
        table = cluster.create_table(TableSpec(next(_names), 3))
        for _ in range(pushes):
            table.push([], np.empty((0, 3), np.float32), LR)
        report = other.import_table(table.export(tmp_path / f"empty{suffix}").path)
        assert (report.num_rows, report.table_step, report.created) == (0, pushes, True)
        assert report.options == (LR if pushes else None)
        assert_same(table, other.table(table.name))


def test_rows_that_were_never_written_start_as_they_did_where_the_table_came_from(
    cluster: LocalCluster, other: LocalCluster, tmp_path: Path
) -> None:
    table = trained(cluster)
    path = table.export(tmp_path / "items.npz").path
    copied = other.import_table(path, next(_names))
    assert copied.same_initial_rows
    np.testing.assert_array_equal(other.table(copied.table).pull([5000, -1]), table.pull([5000, -1]))
    there = other.create_table(TableSpec(next(_names), 5))
    assert not other.import_table(path, there.name).same_initial_rows
    assert (there.pull([5000]) != table.pull([5000])).all()


@pytest.mark.case("C079")
def test_overwriting_makes_the_table_what_the_file_says_each_time_anew(cluster: LocalCluster, tmp_path: Path) -> None:
    table = trained(cluster)
    copy = cluster.table(cluster.import_table(table.export(tmp_path / "items.npz").path, next(_names)).table)
    for _ in range(2):
        copy.assign([5000, 6000, 0], np.ones((3, 5), np.float32))
        copy.delete(sorted_rows(table).row_ids[:3])
        with pytest.raises(CheckpointMismatch, match=r"has \d+ rows and step 10, which .*items.npz would replace"):
            cluster.import_table(tmp_path / "items.npz", copy.name)
        report = cluster.import_table(tmp_path / "items.npz", copy.name, overwrite=True)
        assert (report.num_deleted, report.created) == (2, False)
        assert_same(table, copy)


def test_a_step_is_never_turned_back(cluster: LocalCluster, tmp_path: Path) -> None:
    table = trained(cluster)
    path = table.export(tmp_path / "items.npz").path
    push_once_more(table)
    before = sorted_rows(table)
    with pytest.raises(CheckpointMismatch, match=r"has taken 11 steps and .* has step 10"):
        cluster.import_table(path, overwrite=True)
    np.testing.assert_array_equal(sorted_rows(table).weight, before.weight)
    report = cluster.import_table(path, overwrite=True, weights_only=True)
    assert (report.table_step, report.moments) == (11, False)
    assert not sorted_rows(table).exp_avg.any()
    file_rows = np.concatenate([rows.weight for rows in TableFile(path).blocks()])
    np.testing.assert_array_equal(sorted_rows(table).weight, file_rows)


@pytest.mark.case("C078")
@pytest.mark.parametrize(
    ("present", "words"),
    [
        (TableSpec("x", 16), "dim is 5 in the file and 16 in the cluster"),
        (TableSpec("x", 5, "bfloat16"), "dtype is 'float32' in the file and 'bfloat16' in the cluster"),
        (TableSpec("x", 5, num_embeddings=5), "num_embeddings is None in the file and 5 in the cluster"),
        (TableSpec("x", 5, step="row"), "step is 'table' in the file and 'row' in the cluster"),
    ],
)
def test_another_schema_is_refused_the_right_way_round(
    cluster: LocalCluster, tmp_path: Path, present: TableSpec, words: str
) -> None:
    path = trained(cluster).export(tmp_path / "items.npz").path
    name = next(_names)
    table = cluster.create_table(
        TableSpec(name, present.dim, present.dtype, num_embeddings=present.num_embeddings, step=present.step)
    )
    with pytest.raises(SchemaMismatch, match=words) as caught:
        cluster.import_table(path, name, overwrite=True)
    assert repr(name) in caught.value.message
    assert table.stats().num_rows == 0


@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        ("weight", np.nan, NonFiniteState),
        ("exp_avg_sq", -1.0, NonFiniteState),
        ("ids", None, WrongShape),
        ("exp_avg", None, WrongShape),
        ("metadata", None, CheckpointDamaged),
    ],
)
def test_a_bad_file_changes_nothing_and_creates_no_table(
    cluster: LocalCluster, tmp_path: Path, column: str, value: float | None, error: type[ShardamError]
) -> None:
    path = trained(cluster).export(tmp_path / "items.npz").path
    with np.load(path) as file:
        arrays = {name: file[name].copy() for name in file.files}
    if column == "metadata":
        arrays["shardam_table"] = np.array("{}")
    elif column == "ids":
        arrays["ids"][-1] = arrays["ids"][0]
    elif value is None:
        arrays[column] = arrays[column][:, :4]
    else:
        arrays[column][-1, -1] = value
    np.savez(path, **arrays)
    name = next(_names)
    with pytest.raises(error, match=r"items\.npz"):
        cluster.import_table(path, name)
    assert name not in [info.name for info in cluster.tables()]


def test_a_bounded_table_with_padding_comes_back(cluster: LocalCluster, other: LocalCluster, tmp_path: Path) -> None:
    table = trained(cluster, num_embeddings=200)
    padded = cluster.create_table(TableSpec(next(_names), 2, num_embeddings=10, padding_idx=3))
    padded.push([1, 3, 9], np.ones((3, 2), np.float32), LR)
    padded.assign([3], [[5.0, 6.0]])
    for each in (table, padded):
        other.import_table(each.export(tmp_path / "items.safetensors").path)
        assert_same(each, other.table(each.name))
        assert other.table(each.name).spec == each.spec


def test_a_table_that_changes_while_it_is_read_says_so(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = trained(cluster)
    scan = table.scan

    def scan_and_push(*, batch_size: int = 10_000) -> Iterator[Rows]:
        for rows in scan(batch_size=batch_size):
            push_once_more(table)
            yield rows

    monkeypatch.setattr(table, "scan", scan_and_push)
    written = table.export(tmp_path / "items.npz")
    assert not written.one_moment
    assert not TableFile(written.path).info.one_moment
    assert not cluster.import_table(written.path, next(_names)).one_moment


def test_flags_paths_and_suffixes_are_checked(cluster: LocalCluster, tmp_path: Path) -> None:
    table = trained(cluster)
    with pytest.raises(BadOption, match=r"ends in \.safetensors or \.npz"):
        table.export(tmp_path / "items.pt")
    with pytest.raises(BadOption, match="cannot be written"):
        table.export(tmp_path / "missing" / "items.npz")
    with pytest.raises(BadOption, match="there is no table file"):
        cluster.import_table(tmp_path / "items.npz")
    path = table.export(tmp_path / "items.npz").path
    with pytest.raises(BadOption, match="overwrite must be True or False"):
        cluster.import_table(path, overwrite="no")  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="table name"):
        cluster.import_table(path, "../x")
