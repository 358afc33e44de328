"""A table's file in both formats: what comes back, what other programs see, and every refusal."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from shardam_proto.errors import (
    BadOption,
    CheckpointDamaged,
    IdOutOfRange,
    NonFiniteState,
    SchemaMismatch,
    ShardamError,
    VersionMismatch,
    WrongShape,
)
from shardam_proto.schema import Constant, StepModeName, TableSpec
from shardam_proto.table_file_columns import METADATA_NAME
from shardam_proto.table_file_writing import TableFileWriter
from shardam_proto.table_files import SUFFIXES, TableFile, TableFileInfo, TableRows, rows_per_block
from shardam_proto.v1 import common_pb2

suffixes = pytest.mark.parametrize("suffix", SUFFIXES)


def spec_of(dim: int = 3, step: StepModeName = "row", num_embeddings: int | None = None) -> TableSpec:
    return TableSpec("items", dim, "bfloat16", Constant(0.25), num_embeddings, step=step)


def info_of(spec: TableSpec) -> TableFileInfo:
    options = common_pb2.AdamOptions(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, grad_scale=1.0)
    return TableFileInfo(spec, table_step=10, table_seed=2**62 + 1, last_options=options)


def rows_of(ids: list[int], dim: int = 3) -> TableRows:
    values = np.repeat(np.array(ids, np.float32)[:, None], dim, axis=1)
    return TableRows(np.array(ids), values, values + 0.5, values * values, np.arange(len(ids), dtype=np.uint32))


def write(path: Path, spec: TableSpec, *parts: TableRows) -> Path:
    with TableFileWriter(path, spec) as writer:
        for part in parts:
            writer.add(part)
        assert writer.finish(info_of(spec)) == sum(len(part.row_ids) for part in parts)
    return path


def arrays_of(num_rows: int = 2, dim: int = 3) -> dict[str, np.ndarray]:
    floats = {name: np.ones((num_rows, dim), np.float32) for name in ("weight", "exp_avg", "exp_avg_sq")}
    return {"ids": np.arange(num_rows), **floats, "row_steps": np.ones(num_rows, np.uint32)}


def save(path: Path, arrays: dict[str, np.ndarray], text: str | None = None) -> Path:
    """Writes a file as another program would."""
    text = info_of(spec_of()).to_json() if text is None else text
    if path.suffix == ".npz":
        np.savez_compressed(path, **arrays, **{METADATA_NAME: np.array(text)})  # type: ignore[arg-type]  # its other keyword is a bool
    else:
        safetensors.numpy.save_file(arrays, path, {METADATA_NAME: text})
    return path


@suffixes
def test_rows_come_back_in_the_order_of_their_ids_with_all_that_is_said_of_the_table(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"items{suffix}", spec_of(), rows_of([5, -1]), rows_of([3]), rows_of([]))
    file = TableFile(path)
    file.check_rows()
    assert file.info == info_of(spec_of())
    (rows,) = file.blocks()
    assert rows.row_ids.tolist() == [-1, 3, 5]
    assert rows.row_steps is not None
    assert rows.row_steps.tolist() == [1, 0, 0]
    np.testing.assert_array_equal(rows.weight[:, 0], [-1, 3, 5])
    np.testing.assert_array_equal(rows.exp_avg, rows.weight + 0.5)
    np.testing.assert_array_equal(rows.exp_avg_sq, rows.weight**2)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@suffixes
def test_a_table_without_rows_and_one_of_many_blocks_come_back(tmp_path: Path, suffix: str) -> None:
    empty = TableFile(write(tmp_path / f"empty{suffix}", spec_of(step="table")))
    empty.check_rows()
    assert (empty.num_rows, list(empty.blocks())) == (0, [])
    dim = 50_000
    assert rows_per_block(dim) < 100
    spec = spec_of(dim, "table")
    ids = np.random.default_rng(0).permutation(100).tolist()
    file = TableFile(write(tmp_path / f"wide{suffix}", spec, rows_of(ids[:30], dim), rows_of(ids[30:], dim)))
    file.check_rows()
    blocks = list(file.blocks())
    assert len(blocks) > 1
    assert np.concatenate([block.row_ids for block in blocks]).tolist() == list(range(100))
    assert np.concatenate([block.weight[:, -1] for block in blocks]).tolist() == list(range(100))
    assert all(block.row_steps is None for block in blocks)


@suffixes
def test_the_same_rows_make_the_same_bytes_in_whatever_order_they_came(tmp_path: Path, suffix: str) -> None:
    one = write(tmp_path / f"one{suffix}", spec_of(step="table"), rows_of([5, -1, 3]))
    other = write(tmp_path / f"other{suffix}", spec_of(step="table"), rows_of([3]), rows_of([-1, 5]))
    assert one.read_bytes() == other.read_bytes()


def test_other_programs_read_both_formats(tmp_path: Path) -> None:
    npz = np.load(write(tmp_path / "items.npz", spec_of(), rows_of([5, -1])), allow_pickle=False)
    tensors = safetensors.numpy.load_file(write(tmp_path / "items.safetensors", spec_of(), rows_of([5, -1])))
    assert set(tensors) == {"ids", "weight", "exp_avg", "exp_avg_sq", "row_steps"}
    for name, array in tensors.items():
        assert array.dtype == npz[name].dtype
        np.testing.assert_array_equal(array, npz[name])
    assert json.loads(str(npz[METADATA_NAME]))["table_step"] == 10


@suffixes
def test_a_file_that_another_program_wrote_is_read_in_its_own_order(tmp_path: Path, suffix: str) -> None:
    arrays = arrays_of(3)
    arrays["ids"] = np.array([7, -(2**63), 2**63 - 1])
    file = TableFile(save(tmp_path / f"items{suffix}", arrays))
    file.check_rows()
    assert [block.row_ids.tolist() for block in file.blocks()] == [[7, -(2**63), 2**63 - 1]]


@suffixes
@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"weight": np.ones((2, 4), np.float32)}, WrongShape, r"weight must have shape \(2, 3\).*it has shape \(2, 4\)"),
        ({"exp_avg": np.ones((3, 3), np.float32)}, WrongShape, "exp_avg must have shape"),
        ({"ids": np.ones((2, 1), np.int64)}, WrongShape, "ids must have shape"),
        ({"weight": np.ones((2, 3), np.float16)}, SchemaMismatch, "weight must be float32, it is float16"),
        ({"ids": np.ones(2, np.int32)}, SchemaMismatch, "ids must be int64, it is int32"),
        ({"row_steps": np.ones(2, np.int64)}, SchemaMismatch, "row_steps must be uint32"),
        ({"row_steps": None}, SchemaMismatch, "needs"),
        ({"step": np.ones(2, np.int64)}, SchemaMismatch, "has arrays"),
    ],
)
def test_arrays_that_do_not_fit_the_schema_are_refused(
    tmp_path: Path, suffix: str, changed: dict[str, np.ndarray | None], error: type[ShardamError], words: str
) -> None:
    arrays = {name: array for name, array in (arrays_of() | changed).items() if array is not None}
    path = save(tmp_path / f"items{suffix}", arrays)
    with pytest.raises(error, match=words) as caught:
        TableFile(path)
    assert str(path) in caught.value.message


@suffixes
@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        ("weight", np.nan, NonFiniteState),
        ("exp_avg", np.inf, NonFiniteState),
        ("exp_avg_sq", -1e-20, NonFiniteState),
        ("ids", 0, WrongShape),
    ],
)
def test_values_that_no_table_may_hold_are_found_before_any_is_written(
    tmp_path: Path, suffix: str, column: str, value: float, error: type[ShardamError]
) -> None:
    arrays = arrays_of(3)
    arrays[column][1] = value
    file = TableFile(save(tmp_path / f"items{suffix}", arrays))
    with pytest.raises(error, match=r"\[0\]" if column == "ids" else r"\[1\]"):
        file.check_rows()


@suffixes
def test_ids_outside_a_bounded_table_are_found(tmp_path: Path, suffix: str) -> None:
    file = TableFile(write(tmp_path / f"items{suffix}", spec_of(num_embeddings=5), rows_of([5, 4, -1])))
    with pytest.raises(IdOutOfRange, match=r"0 to 4; it has \[-1, 5\]"):
        file.check_rows()


@suffixes
def test_another_version_or_no_description_is_refused(tmp_path: Path, suffix: str) -> None:
    newer = info_of(spec_of()).to_json().replace('"version": 1', '"version": 2')
    with pytest.raises(VersionMismatch, match="version 2, this program reads version 1"):
        TableFile(save(tmp_path / f"newer{suffix}", arrays_of(), newer))
    for text in ("{}", "[]", "no json", info_of(spec_of()).to_json().replace('"dim"', '"width"')):
        with pytest.raises(CheckpointDamaged, match="description"):
            TableFile(save(tmp_path / f"odd{suffix}", arrays_of(), text))
    bare = tmp_path / f"bare{suffix}"
    if suffix == ".npz":
        np.savez(bare, **arrays_of())  # type: ignore[arg-type]  # its other keyword is a bool
    else:
        safetensors.numpy.save_file(arrays_of(), bare)
    with pytest.raises(BadOption, match="no table that shardam exported"):
        TableFile(bare)


@suffixes
@pytest.mark.parametrize("part", [0.2, 0.9, 0.999])
def test_a_truncated_file_is_named_and_refused(tmp_path: Path, suffix: str, part: float) -> None:
    path = write(tmp_path / f"items{suffix}", spec_of(), rows_of(list(range(1000))))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(CheckpointDamaged, match=f"items{suffix} cannot be read"):
        TableFile(path).check_rows()


def test_a_flipped_byte_in_an_npz_file_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "items.npz", spec_of(), rows_of(list(range(1000))))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="CRC"):
        TableFile(path).check_rows()


@pytest.mark.case("C081")
def test_a_pickle_in_a_file_is_never_opened(tmp_path: Path) -> None:
    opened = tmp_path / "opened"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return Path.touch, (str(opened),)

    payload = np.array([Payload(), Payload()], dtype=object)
    with pytest.raises(SchemaMismatch, match="row_steps must be uint32, it is object"):
        TableFile(save(tmp_path / "array.npz", arrays_of() | {"row_steps": payload}))
    np.savez(tmp_path / "words.npz", allow_pickle=True, **arrays_of(), **{METADATA_NAME: payload})
    with pytest.raises(CheckpointDamaged, match="allow_pickle"):
        TableFile(tmp_path / "words.npz")
    assert not opened.exists()


def test_other_suffixes_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"\.safetensors or \.npz"):
        TableFile(tmp_path / "items.pt")
    with pytest.raises(BadOption, match="there is no table file"):
        TableFile(tmp_path / "items.npz")
    with pytest.raises(BadOption, match="No such file or directory"):
        TableFileWriter(tmp_path / "missing" / "items.npz", spec_of())


@suffixes
def test_an_unfinished_or_refused_file_leaves_the_former_one_alone(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"items{suffix}", spec_of(), rows_of([1]))
    before = path.read_bytes()
    with TableFileWriter(path, spec_of()) as writer:
        writer.add(rows_of([2]))
    with TableFileWriter(path, spec_of()) as writer:
        writer.add(rows_of([2]))
        writer.add(rows_of([2]))
        with pytest.raises(WrongShape, match=r"\[2\] were added"):
            writer.finish(info_of(spec_of()))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "items.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        TableFile(path)
