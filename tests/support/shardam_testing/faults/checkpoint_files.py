"""A checkpoint's files, read by code of the tests' own: what its form promises, not what shardam's reader makes of it.

preamble   magic (8 bytes), format version (u32), arithmetic version (u32), xxh3_64 of these (u64)
frame      magic (u32), message bytes (u32), array bytes (u64), sequence (u64), xxh3_64 of the body (u64), xxh3_64 of the
           header before it (u64); then the message, then the arrays
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_testing.faults.comparison import ALL_FIELDS, differences, joined
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.oracle_table import TableRows

MANIFEST = "manifest.json"

SEGMENT_MAGIC = b"SHRDAMC\n"

_VERSIONS = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")
_HEADER = struct.Struct("<IIQQQ")
_FRAME_MAGIC = 0x4D524653


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTable:
    """A table of one shard's files."""

    info: common_pb2.TableInfo
    rows: TableRows


@dataclasses.dataclass(frozen=True, eq=False)
class StoredShard:
    """What one shard wrote.

    Attributes:
        index: the shard.
        change_number: its change number at the cut, as every one of its files says.
        tables: by name.
        clients: by id.
        groups: by name.
    """

    index: int
    change_number: int
    tables: Mapping[str, StoredTable]
    clients: Mapping[bytes, journal_pb2.StoredClient]
    groups: Mapping[str, journal_pb2.StoredGroup]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredCheckpoint:
    """A checkpoint.

    Attributes:
        folder: where it lies.
        clients: client id -> number, as the manifest says it.
        steps: table -> its step, as the manifest says it.
        num_rows: table -> its rows over all shards, as the manifest says it.
        shards: what each shard wrote.
    """

    folder: Path
    clients: Mapping[bytes, int]
    steps: Mapping[str, int]
    num_rows: Mapping[str, int]
    shards: tuple[StoredShard, ...]

    def rows(self) -> dict[str, TableRows]:
        """Returns the rows of every table over all shards."""
        return {name: joined([shard.tables[name].rows for shard in self.shards]) for name in self.steps}


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Reads a whole checkpoint.

    Raises:
        AssertionError: a file is not what its manifest or its form says.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())["content"]
    shards = tuple(_read_shard(folder, manifest, entry) for entry in manifest["shards"])
    tables = manifest["tables"]
    stored = StoredCheckpoint(
        folder,
        {bytes.fromhex(client_id): number for client_id, number in manifest["clients"].items()},
        {table["spec"]["name"]: table["step"] for table in tables},
        {table["spec"]["name"]: table["num_rows"] for table in tables},
        shards,
    )
    assert [shard.index for shard in shards] == list(range(manifest["num_shards"])), f"{folder}: shards {manifest['shards']}"
    for name, count in stored.num_rows.items():
        found = sum(shard.tables[name].rows.row_ids.size for shard in shards)
        assert found == count, f"{folder}: table {name} has {found} rows, its manifest says {count}"
    return stored


def compare_shard(stored: StoredCheckpoint, shard: StoredShard, oracle: Oracle) -> list[str]:
    """Compares one shard's files with the oracle of its journal at that change; one line for each difference."""
    assert oracle.change_number == shard.change_number
    place = f"{stored.folder.name}, shard {shard.index}"
    found = []
    for table in oracle.tables.values():
        name = table.spec.name
        if name not in shard.tables:
            found.append(f"table {name} is missing")
            continue
        found += [f"table {name}, {line}" for line in differences(table.rows(), shard.tables[name].rows, ALL_FIELDS)]
        steps = {"the shard's files": shard.tables[name].info.table_step, "the manifest": stored.steps.get(name)}
        found += [
            f"table {name} is at step {table.step}, {who} says {step}" for who, step in steps.items() if step != table.step
        ]
    found += _compare_clients(stored, shard, oracle)
    return [f"{place}: {line}" for line in found]


def _compare_clients(stored: StoredCheckpoint, shard: StoredShard, oracle: Oracle) -> list[str]:
    found = []
    open_ones = {client_id for client_id, client in oracle.clients.items() if not client.ended}
    written = {client_id: client.last_number for client_id, client in shard.clients.items()}
    for who, numbers, expected in (
        ("its files", written, open_ones),
        ("the manifest", stored.clients, {client_id for client_id in open_ones if oracle.clients[client_id].last_number}),
    ):
        right = {client_id: oracle.clients[client_id].last_number for client_id in {*numbers, *expected}}
        if numbers != right:
            found.append(f"clients are at {_hex(right)}, {who} say {_hex(numbers)}")
    steps = {name: group.step for name, group in oracle.groups.groups.items()}
    if steps != {name: group.step for name, group in shard.groups.items()}:
        found.append(
            f"groups are at {steps}, its files say {[(group.group.name, group.step) for group in shard.groups.values()]}"
        )
    return found


def _hex(numbers: Mapping[bytes, int]) -> dict[str, int]:
    return {client_id.hex()[:8]: number for client_id, number in sorted(numbers.items())}


# -- files


def _read_shard(folder: Path, manifest: Mapping[str, object], entry: Mapping[str, object]) -> StoredShard:
    reading = _Reading(int(str(entry["index"])), int(str(entry["change_number"])))
    files = entry["files"]
    assert isinstance(files, list)
    for segment, file in enumerate(files):
        path = folder / file["name"]
        data = path.read_bytes()
        assert len(data) == file["size_bytes"], f"{path} has {len(data)} bytes, not {file['size_bytes']}"
        assert xxhash.xxh3_128_hexdigest(data) == file["xxh3"], f"{path} is not what its manifest says"
        reading.take_file(path, data, segment)
    return reading.shard()


class _Reading:
    """One shard's files, one after the other."""

    def __init__(self, index: int, change_number: int) -> None:
        self._index, self._change_number = index, change_number
        self._infos: dict[int, common_pb2.TableInfo] = {}
        self._rows: list[tuple[journal_pb2.StoredRows, bytes]] = []
        self._clients: dict[bytes, journal_pb2.StoredClient] = {}
        self._groups: dict[str, journal_pb2.StoredGroup] = {}

    def take_file(self, path: Path, data: bytes, segment: int) -> None:
        frames = read_frames(data, SEGMENT_MAGIC)
        header = journal_pb2.SegmentHeader.FromString(next(frames)[0])
        found = header.shard, header.segment, header.change_number
        assert found == (self._index, segment, self._change_number), f"{path} is of {found}"
        for message, arrays in frames:
            self._take(journal_pb2.BaseRecord.FromString(message), arrays)

    def _take(self, record: journal_pb2.BaseRecord, arrays: bytes) -> None:
        match record.WhichOneof("part"):
            case "table":
                self._infos[record.table.table_id] = record.table
            case "rows":
                self._rows.append((record.rows, arrays))  # their table stands in the shard's last file
            case "client":
                self._clients[record.client.client_id] = record.client
            case "group":
                self._groups[record.group.group.name] = record.group
            case "staged_part":
                raise AssertionError(f"shard {self._index} wrote a staged part into a checkpoint")

    def shard(self) -> StoredShard:
        rows: dict[int, list[TableRows]] = {table_id: [] for table_id in self._infos}
        for message, arrays in self._rows:
            rows[message.table_id].append(_decode_rows(self._infos[message.table_id], message.num_rows, arrays))
        tables = {info.spec.name: StoredTable(info, _joined(info, rows[table_id])) for table_id, info in self._infos.items()}
        return StoredShard(self._index, self._change_number, tables, self._clients, self._groups)


def read_frames(data: bytes, magic: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields message and arrays of each frame of a file.

    Raises:
        AssertionError: the file is not of this form.
    """
    start = _VERSIONS.size + _CHECKSUM.size
    found, _, _ = _VERSIONS.unpack_from(data)
    assert found == magic, f"the file begins with {found!r}, not with {magic!r}"
    assert xxhash.xxh3_64_intdigest(data[: _VERSIONS.size]) == _CHECKSUM.unpack_from(data, _VERSIONS.size)[0], "preamble"
    while start < len(data):
        frame_magic, message_bytes, array_bytes, _, checksum = _HEADER.unpack_from(data, start)
        header_end = start + _HEADER.size
        assert frame_magic == _FRAME_MAGIC, f"no frame begins at byte {start}"
        assert xxhash.xxh3_64_intdigest(data[start:header_end]) == _CHECKSUM.unpack_from(data, header_end)[0], (
            f"frame at {start}"
        )
        first = header_end + _CHECKSUM.size
        end = first + message_bytes + array_bytes
        assert end <= len(data), f"the frame at byte {start} goes on behind the file's end"
        assert xxhash.xxh3_64_intdigest(data[first:end]) == checksum, f"the body of the frame at byte {start}"
        yield data[first : first + message_bytes], data[first + message_bytes : end]
        start = end


def _decode_rows(info: common_pb2.TableInfo, count: int, data: bytes) -> TableRows:
    dim, place = info.spec.dim, 0

    def take(dtype: str, num_values: int) -> npt.NDArray[np.generic]:
        nonlocal place
        array = np.frombuffer(data, dtype, num_values, place) if num_values else np.empty(0, dtype)
        place += array.nbytes
        return array

    row_ids = take("<i8", count).astype(np.int64)
    weight, exp_avg, exp_avg_sq = (take("<f4", count * dim).astype(np.float32).reshape(count, dim) for _ in range(3))
    row_steps, touched, changes = (take(dtype, count).astype(np.int64) for dtype in ("<u4", "<i8", "<u8"))
    assert place == len(data), f"a frame of table {info.spec.name} has {len(data)} bytes, its rows {place}"
    by_row = info.spec.step_mode == common_pb2.STEP_MODE_ROW
    steps = row_steps if by_row else np.full(count, info.table_step, np.int64)
    return TableRows(row_ids, weight, exp_avg, exp_avg_sq, steps, touched, changes)


def _joined(info: common_pb2.TableInfo, parts: list[TableRows]) -> TableRows:
    empty = _decode_rows(info, 0, b"")
    rows = joined([empty, *parts])
    assert np.unique(rows.row_ids).size == rows.row_ids.size, f"table {info.spec.name} has a row twice"
    return rows
