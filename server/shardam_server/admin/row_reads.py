"""Reading rows from the shards that own them, by id and page by page; reading never creates a row."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from shardam_proto.errors import BadOption, MessageTooLarge, ShardamError
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.admin.rows import Int64s, Rows, concatenate, decode, no_rows
from shardam_server.admin.shard_calls import ShardCalls

MAX_RESPONSE_VALUES = 4 * 2**20
"""float32 values of one response: 16 MiB on the wire and about 50 MB of JSON, encoded in well under a second."""

MAX_PAGE_ROWS = 1000
"""Rows of one page at most; wide rows give shorter pages (MAX_RESPONSE_VALUES)."""

_CURSOR = re.compile(r"([0-9]{1,4}):([0-9]{1,20})", re.ASCII)
_MAX_KEY = 2**64 - 1


def read_rows(
    calls: ShardCalls, table: common_pb2.TableInfo, row_ids: Int64s, include_optimizer: bool, request_id: int
) -> tuple[Rows, dict[int, int]]:
    """Reads rows by id from their owners, all or none.

    Args:
        calls: reaches the shards.
        table: its id and dim.
        row_ids: int64 [N], in any order, duplicates allowed.
        include_optimizer: read exp_avg and exp_avg_sq, too.
        request_id: for the shards' logs.

    Returns:
        The rows in the order of `row_ids`, and the table's step on each shard that was asked.

    Raises:
        MessageTooLarge: the answer would have more than MAX_RESPONSE_VALUES values.
        ShardamError: a shard did not answer or refused; nothing is returned then.
    """
    most = _max_rows(table.spec.dim, include_optimizer)
    if len(row_ids) > most:
        raise MessageTooLarge(
            f"{len(row_ids)} rows of table {table.spec.name!r} (dim {table.spec.dim}) are more than one answer holds; "
            f"ask for at most {most} at once",
            metadata={"table": table.spec.name, "limit": str(most), "num_ids": str(len(row_ids))},
        )
    owners = calls.reader.formed().route_map.shards_of(row_ids)
    positions = {int(shard): np.flatnonzero(owners == shard) for shard in np.unique(owners)}
    requests = {
        shard: row_pb2.ReadRowsRequest(
            table_id=table.table_id,
            include_optimizer=include_optimizer,
            row_ids=row_ids[where].astype("<i8").tobytes(),
        )
        for shard, where in positions.items()
    }
    answers = calls.call_many(requests, lambda stubs: stubs.rows.ReadRows, request_id)
    parts, order, steps = [no_rows(table.spec.dim, include_optimizer)], [np.empty(0, np.int64)], {}
    for shard, answer in sorted(answers.items()):
        if isinstance(answer, ShardamError):
            raise answer
        parts.append(decode(answer.rows, shard, table.spec.dim, include_optimizer))
        order.append(positions[shard])
        steps[shard] = answer.table_step
    return concatenate(parts).take(np.argsort(np.concatenate(order))), steps


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of existing rows.

    Attributes:
        rows: the rows, in the shards' own order.
        next_cursor: where the next page starts; None after the last page.
        table_steps: the table's step on each shard that was asked.
    """

    rows: Rows
    next_cursor: str | None
    table_steps: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Cursor:
    """A place in the walk over all rows of a table: shard by shard, in each by the shard's own key.

    Attributes:
        shard: shard index.
        key: from_key of the shard's scan.
    """

    shard: int = 0
    key: int = 0

    def __str__(self) -> str:
        return f"{self.shard}:{self.key}"

    @classmethod
    def parse(cls, text: str, route_map: RouteMap) -> Cursor:
        """Reads the text of a cursor.

        Raises:
            BadOption: it is no cursor of this cluster.
        """
        match = _CURSOR.fullmatch(text)
        if match is None or int(match[2]) > _MAX_KEY or int(match[1]) >= route_map.num_shards:
            raise BadOption(
                f"cursor {text[:40]!r} is none of this cluster's; pass next_cursor of the page before, or none",
                metadata={"cursor": text[:40]},
            )
        return cls(int(match[1]), int(match[2]))


def scan_rows(
    calls: ShardCalls, table: common_pb2.TableInfo, start: Cursor, limit: int, include_optimizer: bool, request_id: int
) -> Page:
    """Reads a page of existing rows; a row that exists throughout a walk appears exactly once in it.

    Args:
        calls: reaches the shards.
        table: its id and dim.
        start: where the page starts.
        limit: rows of the page at most.
        include_optimizer: read exp_avg and exp_avg_sq, too.
        request_id: for the shards' logs.

    Raises:
        ShardamError: a shard did not answer or refused.
    """
    num_shards = calls.reader.formed().route_map.num_shards
    room = min(limit, _max_rows(table.spec.dim, include_optimizer))
    parts = [no_rows(table.spec.dim, include_optimizer)]
    steps: dict[int, int] = {}
    place: Cursor | None = start
    while place is not None and room > 0:
        request = row_pb2.ScanRowsRequest(
            table_id=table.table_id, include_optimizer=include_optimizer, from_key=place.key, max_rows=room
        )
        answer = calls.call(place.shard, lambda stubs: stubs.rows.ScanRows, request, request_id)
        part = decode(answer.rows, place.shard, table.spec.dim, include_optimizer)
        parts.append(part)
        room -= len(part.row_ids)
        steps[place.shard] = answer.table_step
        if answer.HasField("next_key"):
            place = Cursor(place.shard, answer.next_key)
        else:
            place = Cursor(place.shard + 1) if place.shard + 1 < num_shards else None
    return Page(concatenate(parts), None if place is None else str(place), steps)


def _max_rows(dim: int, include_optimizer: bool) -> int:
    return MAX_RESPONSE_VALUES // (dim * (3 if include_optimizer else 1))
