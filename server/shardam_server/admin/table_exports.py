"""Writes a table with its moments and steps to a file; the command line and REST do it alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardam_proto.errors import ShardamError
from shardam_proto.limits import MAX_SCAN_ROWS
from shardam_proto.schema import TableSpec, check_name
from shardam_proto.table_file_writing import TableFileWriter
from shardam_proto.table_files import TableFileInfo, TableRows, rows_per_block
from shardam_proto.v1 import row_pb2, table_pb2
from shardam_server.admin.rows import Rows, decode
from shardam_server.admin.shard_calls import ShardCalls

Tell = Callable[[int, int], None]
"""Is told the rows read so far, and how many there were at the beginning."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        info: what it says of its table.
        num_rows: rows in it.
    """

    info: TableFileInfo
    num_rows: int


def export_table(calls: ShardCalls, name: str, path: Path, request_id: int, tell: Tell = lambda done, total: None) -> Exported:
    """Writes a table to a file.

    Pushes go on meanwhile. Whether one has changed the table while it was read stands in the file (`one_moment`); a checkpoint
    is of one moment always.

    Args:
        calls: reaches the shards.
        name: the table's.
        path: the file, ending in .safetensors or .npz; its folder needs room for twice the file.
        request_id: for the shards' logs.
        tell: is told how far it is.

    Raises:
        BadOption: the name is none, or the file cannot be written.
        ShardamError: a shard did not answer or refused; no file is left.
    """
    before = _ask(calls, name, request_id)
    first = before[0].tables[0]
    spec = TableSpec.from_proto(first.spec)
    total = sum(answer.tables[0].num_rows for answer in before.values())
    one_moment, done = True, 0
    with TableFileWriter(path, spec) as file:
        for shard, answer in before.items():
            key: int | None = 0
            while key is not None:
                rows, key = _scan(calls, shard, answer.tables[0].table_id, spec, key, request_id)
                one_moment &= not bool((rows.change_number > np.uint64(answer.header.change_number)).any())
                file.add(_to_file(rows, spec))
                done += len(rows.row_ids)
                tell(done, total)
        after = [answer.tables[0] for answer in _ask(calls, name, request_id).values()]
        latest = max(after, key=lambda info: info.table_step)
        steps = {info.table_step for info in after} | {answer.tables[0].table_step for answer in before.values()}
        info = TableFileInfo(
            spec=spec,
            table_step=latest.table_step,
            table_seed=first.table_seed,
            last_options=latest.last_options if latest.HasField("last_options") else None,
            one_moment=one_moment and done == total and len(steps) == 1,
        )
        return Exported(info, file.finish(info))


def _ask(calls: ShardCalls, name: str, request_id: int) -> dict[int, table_pb2.ListTablesResponse]:
    """Returns the table as each shard sees it, all asked at once; or raises what the first of them says."""
    check_name(name)
    num_shards = calls.reader.formed().route_map.num_shards
    requests = {shard: table_pb2.ListTablesRequest(names=[name]) for shard in range(num_shards)}
    answers: dict[int, table_pb2.ListTablesResponse] = {}
    for shard, answer in calls.call_many(requests, lambda stubs: stubs.tables.ListTables, request_id).items():
        if isinstance(answer, ShardamError):
            raise answer
        answers[shard] = answer
    return answers


def _scan(
    calls: ShardCalls, shard: int, table_id: int, spec: TableSpec, from_key: int, request_id: int
) -> tuple[Rows, int | None]:
    request = row_pb2.ScanRowsRequest(
        table_id=table_id,
        include_optimizer=True,
        from_key=from_key,
        max_rows=min(rows_per_block(spec.dim), MAX_SCAN_ROWS),
    )
    answer = calls.call(shard, lambda stubs: stubs.rows.ScanRows, request, request_id)
    next_key = answer.next_key if answer.HasField("next_key") else None
    return decode(answer.rows, answer.header, spec.dim, include_optimizer=True), next_key


def _to_file(rows: Rows, spec: TableSpec) -> TableRows:
    assert rows.exp_avg is not None
    assert rows.exp_avg_sq is not None
    row_steps = rows.step.astype(np.uint32) if spec.step == "row" else None
    return TableRows(rows.row_ids, rows.weight, rows.exp_avg, rows.exp_avg_sq, row_steps)
