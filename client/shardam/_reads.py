"""Reads of rows from all shards at once: ids are split by the route map, answers scattered back in the order asked for.

Weights come over the shards' streams, behind this client's changes; rows with their moments by unary calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from shardam._arrays import Float32s, Int64s, to_wire
from shardam._calls import AnswerT, AnyCall, PullCall, ShardCall
from shardam._link import ShardLink
from shardam._session import Session
from shardam._shards import Shards, ShardsMoved
from shardam._split import HEADER_BYTES, positions_by_shard
from shardam._values import Rows, TableInfo
from shardam_proto.limits import MAX_MESSAGE_BYTES, MAX_SCAN_ROWS
from shardam_proto.routing import scan_keys
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2

SECTION_BYTES = 64
"""Room for one section and its table's step in a message, rounded up."""

ROW_COUNTER_BYTES = 64
"""Room for a row's id, flag and counters in a message, rounded up."""


@dataclasses.dataclass
class _PullMessage:
    """One message of a pull: which positions of which of the asked tables it reads, and how full it is."""

    link: ShardLink
    pieces: list[tuple[int, Int64s]] = dataclasses.field(default_factory=list)
    num_bytes: int = HEADER_BYTES


def read_weights(session: Session, wanted: Sequence[tuple[TableInfo, Int64s]], *, training: bool = False) -> list[Float32s]:
    """Reads weights of any number of tables, one message per shard where the answer fits one.

    Args:
        session: the client.
        wanted: tables and ids, int64 [N], duplicates allowed.
        training: True: a gradient of what is read will be pushed, so a member of a group waits: in sync until the step before
            is applied, in bounded mode until no member is too far behind.

    Returns:
        float32 [N, dim] for each, writable.

    Raises:
        ShardamError: as Session.answer.
    """
    step = session.membership.step if training and session.membership is not None else 0
    return session.ask(lambda shards: _read_weights(session, shards, wanted, step))


@dataclasses.dataclass(frozen=True)
class ShardVersion:
    """Up to which change of one shard rows were read.

    Attributes:
        epoch: epoch of the route map by which it owns them.
        incarnation: process life that read them; another one may have lost changes that nobody was told of.
        lineage: lineage of its state.
        timeline: timeline of its state.
        change_number: changes that it had applied.
    """

    epoch: int
    incarnation: int
    lineage: int
    timeline: int
    change_number: int


Versions = tuple[ShardVersion, ...]
"""Of each shard, by index."""


class PendingRead:
    """A read that is under way."""

    def __init__(self, session: Session, wanted: Sequence[tuple[TableInfo, Int64s]], training: bool) -> None:
        self._rows = read_weights(session, wanted, training=training)
        self.versions: Versions = ()

    def result(self) -> list[Float32s]:
        """Waits for the rows: float32 [N, dim] of each table, writable. `versions` says from then on which they are.

        Raises:
            ShardamError: as Session.answer.
        """
        return self._rows


def read_weights_later(session: Session, wanted: Sequence[tuple[TableInfo, Int64s]], *, training: bool = False) -> PendingRead:
    """Asks for weights as read_weights does, and does not wait for them."""
    return PendingRead(session, wanted, training)


def read_changed(
    session: Session,
    wanted: Sequence[tuple[TableInfo, Int64s]],
    versions: Versions,
    rows: Sequence[Float32s],
    *,
    training: bool = False,
) -> int:
    """Brings rows that were read before to the state of now.

    Args:
        session: the client.
        wanted: as they were read.
        versions: of that read.
        rows: its results; rows that have changed since are replaced in place. After an error they are of no single moment.
        training: as for read_weights.

    Returns:
        How many rows came anew.

    Raises:
        ShardamError: as Session.answer.
    """
    for old, new in zip(rows, read_weights(session, wanted, training=training), strict=True):
        old[...] = new
    return sum(row_ids.size for _, row_ids in wanted)


def _read_weights(session: Session, shards: Shards, wanted: Sequence[tuple[TableInfo, Int64s]], step: int) -> list[Float32s]:
    results = [np.empty((row_ids.size, info.spec.dim), np.float32) for info, row_ids in wanted]
    messages = _pull_messages(shards, wanted)
    requests = [PullCall(message.link, _pull_request(message, wanted), step) for message in messages]
    for message, answer in zip(messages, _answer_all(session, requests), strict=True):
        rows, start = np.frombuffer(answer.rows, dtype="<f4"), 0
        for table, positions in message.pieces:
            dim = wanted[table][0].spec.dim
            end = start + positions.size * dim
            results[table][positions] = rows[start:end].reshape(positions.size, dim)
            start = end
    return results


def _pull_messages(shards: Shards, wanted: Sequence[tuple[TableInfo, Int64s]]) -> list[_PullMessage]:
    """Fills messages shard by shard so that neither a request nor its answer is above MAX_MESSAGE_BYTES."""
    split = [list(positions_by_shard(shards.route_map, row_ids)) for _, row_ids in wanted]
    messages: list[_PullMessage] = []
    for link in shards.links:
        current = _PullMessage(link)
        for table, (info, row_ids) in enumerate(wanted):
            positions = np.arange(row_ids.size)[split[table][link.index]]
            row_bytes = max(8, 4 * info.spec.dim)
            while positions.size:
                room = (MAX_MESSAGE_BYTES - current.num_bytes - SECTION_BYTES) // row_bytes
                if room <= 0:
                    messages.append(current)
                    current = _PullMessage(link)
                    continue
                current.pieces.append((table, positions[:room]))
                current.num_bytes += SECTION_BYTES + row_bytes * min(room, positions.size)
                positions = positions[room:]
        if current.pieces:
            messages.append(current)
    return messages


def _pull_request(message: _PullMessage, wanted: Sequence[tuple[TableInfo, Int64s]]) -> embedding_pb2.PullRequest:
    sections = [
        common_pb2.Section(table_id=wanted[table][0].table_id, num_rows=positions.size, dtype=common_pb2.DTYPE_FLOAT32)
        for table, positions in message.pieces
    ]
    row_ids = b"".join(to_wire(wanted[table][1][positions]) for table, positions in message.pieces)
    return embedding_pb2.PullRequest(sections=sections, row_ids=row_ids)


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
            calls.append(ShardCall(link, lambda link: link.rows.ReadRows, request))
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
            answer = session.answer(ShardCall(link, lambda link: link.rows.ScanRows, request))
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
