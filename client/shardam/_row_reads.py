"""Reads of rows with their moments, from all shards at once, by unary calls; weights alone come over streams (_reads.py)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from shardam._arrays import Float32s, Int64s, to_wire
from shardam._calls import AnswerT, AnyCall
from shardam._session import Session
from shardam._shards import Shards, ShardsMoved
from shardam._split import HEADER_BYTES, positions_by_shard
from shardam._unary_reads import unary_read
from shardam._values import Rows, TableInfo
from shardam_proto.limits import MAX_MESSAGE_BYTES, MAX_SCAN_ROWS
from shardam_proto.routing import scan_keys
from shardam_proto.v1 import row_pb2

ROW_COUNTER_BYTES = 64
"""Room for a row's id, flag and counters in a message, rounded up."""


def read_rows(session: Session, info: TableInfo, row_ids: Int64s) -> Rows:
    """Reads rows with their moments; a row that does not exist is not created.

    Args:
        session: the client.
        info: the table.
        row_ids: int64 [N], duplicates allowed.

    Raises:
        ShardamError: as Session.answer.
    """
    return session.ask(lambda shards: _read_rows(session, shards, info, row_ids))


def _read_rows(session: Session, shards: Shards, info: TableInfo, row_ids: Int64s) -> Rows:
    limit = _rows_per_message(info.spec.dim)
    calls, places = [], []
    for link, in_shard in zip(shards.links, positions_by_shard(shards.route_map, row_ids), strict=True):
        positions = np.arange(row_ids.size)[in_shard]
        for start in range(0, positions.size, limit):
            place = positions[start : start + limit]
            request = row_pb2.ReadRowsRequest(table_id=info.table_id, include_optimizer=True, row_ids=to_wire(row_ids[place]))
            calls.append(unary_read(session, link, lambda link: link.rows.ReadRows, request))
            places.append(place)
    result = _empty_rows(row_ids.size, info.spec.dim)
    for place, answer in zip(places, _answer_all(session, calls), strict=True):
        page = _decode_rows(answer.rows, info.spec.dim)
        for field in dataclasses.fields(Rows):
            getattr(result, field.name)[place] = getattr(page, field.name)
    return result


def scan_rows(session: Session, info: TableInfo, batch_size: int) -> Iterator[Rows]:
    """Yields existing rows, shard by shard, at most batch_size at a time; see Table.scan.

    Where the client goes on to other shards meanwhile, these are scanned from the beginning, and rows that were yielded before
    are left out.

    Raises:
        ShardamError: as Session.answer.
    """
    max_rows = min(batch_size, MAX_SCAN_ROWS, _rows_per_message(info.spec.dim))
    passed: list[_Passed] = []
    while True:
        progress = _Passed(info, session.shards)
        try:
            for rows in _scan(session, progress, max_rows):
                fresh = ~np.logical_or.reduce([np.zeros(len(rows), np.bool_), *(former.has(rows.row_ids) for former in passed)])
                if fresh.any():
                    yield rows if fresh.all() else _some_of(rows, fresh)
            return
        except ShardsMoved:
            passed.append(progress)


@dataclasses.dataclass
class _Passed:
    """How far a scan has come on the shards of one route map.

    Attributes:
        info: the table.
        shards: the shards.
        index: the shard that is being scanned; those before are done.
        next_key: of its keys those below are done.
    """

    info: TableInfo
    shards: Shards
    index: int = 0
    next_key: int = 0

    def has(self, row_ids: Int64s) -> npt.NDArray[np.bool_]:
        """Says of each id whether the scan is past it."""
        owners = self.shards.route_map.shards_of(row_ids)
        keys = scan_keys(row_ids, bounded=self.info.spec.num_embeddings is not None)
        found: npt.NDArray[np.bool_] = (owners < self.index) | ((owners == self.index) & (keys < np.uint64(self.next_key)))
        return found


def _scan(session: Session, progress: _Passed, max_rows: int) -> Iterator[Rows]:
    """Scans shards and notes how far it has come, before each batch is yielded."""
    info = progress.info
    for link in progress.shards.links:
        next_key: int | None = 0
        progress.index, progress.next_key = link.index, 0
        while next_key is not None:
            request = row_pb2.ScanRowsRequest(
                table_id=info.table_id, include_optimizer=True, from_key=next_key, max_rows=max_rows
            )
            answer = session.answer(unary_read(session, link, lambda link: link.rows.ScanRows, request))
            rows = _decode_rows(answer.rows, info.spec.dim)
            next_key = answer.next_key if answer.HasField("next_key") else None
            progress.index, progress.next_key = (link.index + 1, 0) if next_key is None else (link.index, next_key)
            if len(rows):
                yield rows


def _answer_all(session: Session, calls: Sequence[AnyCall[AnswerT]]) -> list[AnswerT]:
    """Makes read calls side by side; the first problem is raised after all have ended."""
    if len(calls) == 1:
        return [session.answer(calls[0])]
    tasks: list[Callable[[], object]] = [functools.partial(session.answer, call) for call in calls]
    results = session.readers.run_all(tasks)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[AnswerT]", results)


def _rows_per_message(dim: int) -> int:
    return max(1, (MAX_MESSAGE_BYTES - HEADER_BYTES) // (3 * 4 * dim + ROW_COUNTER_BYTES))


def _empty_rows(num_rows: int, dim: int) -> Rows:
    return Rows(
        row_ids=np.empty(num_rows, np.int64),
        weight=np.empty((num_rows, dim), np.float32),
        exp_avg=np.empty((num_rows, dim), np.float32),
        exp_avg_sq=np.empty((num_rows, dim), np.float32),
        step=np.empty(num_rows, np.int64),
        found=np.empty(num_rows, np.bool_),
    )


def _some_of(rows: Rows, wanted: npt.NDArray[np.bool_]) -> Rows:
    """Returns the rows that a mask [N] marks, in their order."""
    return Rows(**{field.name: getattr(rows, field.name)[wanted] for field in dataclasses.fields(Rows)})


def _decode_rows(columns: row_pb2.RowColumns, dim: int) -> Rows:
    def floats(data: bytes) -> Float32s:
        return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(-1, dim)  # astype copies: private and writable

    return Rows(
        row_ids=np.frombuffer(columns.row_ids, dtype="<i8").astype(np.int64),
        weight=floats(columns.weight),
        exp_avg=floats(columns.exp_avg),
        exp_avg_sq=floats(columns.exp_avg_sq),
        step=np.frombuffer(columns.step, dtype="<i8").astype(np.int64),
        found=np.frombuffer(columns.found, dtype=np.uint8).astype(np.bool_),
    )
