"""Reading rows from the shards that own them, by id and page by page; reading never creates a row."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

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

_CURSOR = re.compile(r"([0-9]{1,20}):([0-9]{1,4}):([0-9]{1,20})", re.ASCII)
_MAX_KEY = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class RowQuery:
    """Rows of one table to be read by id.

    Attributes:
        table: its id and dim.
        row_ids: int64 [N], in any order, duplicates allowed.
    """

    table: common_pb2.TableInfo
    row_ids: Int64s


ReadResult = tuple[Rows, dict[int, int]]
"""Rows in the order asked for, and the table's step on each shard that was asked."""


def read_rows(calls: ShardCalls, query: RowQuery, include_optimizer: bool, request_id: int) -> ReadResult:
    """Reads rows of one table; as read_tables."""
    return read_tables(calls, [query], include_optimizer, request_id)[0]


def read_tables(calls: ShardCalls, queries: Sequence[RowQuery], include_optimizer: bool, request_id: int) -> list[ReadResult]:
    """Reads rows of several tables by id from their owners, all calls at once, all rows or none.

    Args:
        calls: reaches the shards.
        queries: the rows by table.
        include_optimizer: read exp_avg and exp_avg_sq, too.
        request_id: for the shards' logs.

    Returns:
        The rows and steps of each query. Each table's rows on one shard are of one moment.

    Raises:
        MessageTooLarge: the answer would have more than MAX_RESPONSE_VALUES values.
        ShardamError: a shard did not answer or refused; nothing is returned then.
    """
    _check_size(queries, include_optimizer)
    return calls.by_route_map(lambda route_map: _read(calls, queries, include_optimizer, request_id, route_map))


def _read(
    calls: ShardCalls, queries: Sequence[RowQuery], include_optimizer: bool, request_id: int, route_map: RouteMap
) -> list[ReadResult]:
    requests: list[tuple[int, row_pb2.ReadRowsRequest]] = []
    places: list[tuple[int, Int64s]] = []  # of each request: its query, and the positions of its ids in it
    for index, query in enumerate(queries):
        owners = route_map.shards_of(query.row_ids)
        for shard in np.unique(owners):
            positions = np.flatnonzero(owners == shard)
            row_ids = query.row_ids[positions].astype("<i8").tobytes()
            request = row_pb2.ReadRowsRequest(
                table_id=query.table.table_id, include_optimizer=include_optimizer, row_ids=row_ids
            )
            requests.append((int(shard), request))
            places.append((index, positions))
    answers = calls.call_each(requests, lambda stubs: stubs.rows.ReadRows, request_id, epoch=route_map.epoch)
    parts = [[no_rows(query.table.spec.dim, include_optimizer)] for query in queries]
    orders = [[np.empty(0, np.int64)] for _ in queries]
    steps: list[dict[int, int]] = [{} for _ in queries]
    for (index, positions), (shard, _), answer in zip(places, requests, answers, strict=True):
        if isinstance(answer, ShardamError):
            raise answer
        parts[index].append(decode(answer.rows, answer.header, queries[index].table.spec.dim, include_optimizer))
        orders[index].append(positions)
        steps[index][shard] = answer.table_step
    return [
        (concatenate(part).take(np.argsort(np.concatenate(order))), step)
        for part, order, step in zip(parts, orders, steps, strict=True)
    ]


def _check_size(queries: Sequence[RowQuery], include_optimizer: bool) -> None:
    values = {query.table.spec.name: _num_values(query.table.spec.dim, include_optimizer) for query in queries}
    if sum(len(query.row_ids) * values[query.table.spec.name] for query in queries) <= MAX_RESPONSE_VALUES:
        return
    widest = max(queries, key=lambda query: len(query.row_ids) * values[query.table.spec.name])
    spec = widest.table.spec
    most = MAX_RESPONSE_VALUES // values[spec.name]
    others = "" if len(queries) == 1 else f", with {len(queries) - 1} other tables,"
    raise MessageTooLarge(
        f"{len(widest.row_ids)} rows of table {spec.name!r} (dim {spec.dim}){others} are more than one answer holds; "
        f"ask for at most {most} of them at once" + ("" if len(queries) == 1 else ", or for fewer tables"),
        metadata={"table": spec.name, "limit": str(most), "num_ids": str(len(widest.row_ids))},
    )


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
        epoch: epoch of the route map; by another one rows lie elsewhere.
        shard: shard index.
        key: from_key of the shard's scan.
    """

    epoch: int
    shard: int = 0
    key: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}:{self.shard}:{self.key}"

    @classmethod
    def parse(cls, text: str, route_map: RouteMap) -> Cursor:
        """Reads the text of a cursor.

        Raises:
            BadOption: it is no cursor of this cluster.
        """
        match = _CURSOR.fullmatch(text)
        if match is not None and int(match[1]) < route_map.epoch:
            raise BadOption(
                f"cursor {text[:40]!r} is from before the cluster moved to {route_map.num_shards} shards; begin the walk anew",
                metadata={"cursor": text[:40]},
            )
        is_ours = match is not None and int(match[1]) == route_map.epoch and int(match[2]) < route_map.num_shards
        if match is None or not is_ours or int(match[3]) > _MAX_KEY:
            raise BadOption(
                f"cursor {text[:40]!r} is none of this cluster's; pass next_cursor of the page before, or none",
                metadata={"cursor": text[:40]},
            )
        return cls(int(match[1]), int(match[2]), int(match[3]))


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
    room = min(limit, MAX_RESPONSE_VALUES // _num_values(table.spec.dim, include_optimizer))
    parts = [no_rows(table.spec.dim, include_optimizer)]
    steps: dict[int, int] = {}
    place: Cursor | None = start
    while place is not None and room > 0:
        request = row_pb2.ScanRowsRequest(
            table_id=table.table_id, include_optimizer=include_optimizer, from_key=place.key, max_rows=room
        )
        answer = calls.call(place.shard, lambda stubs: stubs.rows.ScanRows, request, request_id, epoch=place.epoch)
        part = decode(answer.rows, answer.header, table.spec.dim, include_optimizer)
        parts.append(part)
        room -= len(part.row_ids)
        steps[place.shard] = answer.table_step
        if answer.HasField("next_key"):
            place = Cursor(place.epoch, place.shard, answer.next_key)
        else:
            place = Cursor(place.epoch, place.shard + 1) if place.shard + 1 < num_shards else None
    return Page(concatenate(parts), None if place is None else str(place), steps)


def _num_values(dim: int, include_optimizer: bool) -> int:
    """Returns float32 values of one row in an answer."""
    return dim * (3 if include_optimizer else 1)
