"""Which shard gets which rows, and parts split anew for another route map.

Parts that wait for an answer are kept as they were split. When the map changes, their rows are put together again and split for
the new one, so that nothing is kept twice before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardam._arrays import Float32s, Int64s
from shardam._messages import AssignPart, DeletePart, Payload, PushPart
from shardam_kernels.native import split_by_shard
from shardam_proto.errors import MessageTooLarge
from shardam_proto.limits import MAX_MESSAGE_BYTES, MAX_PART_BYTES
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import row_pb2

HEADER_BYTES = 256
"""Room for a message's header, which is filled in when it is sent (at most about 150 bytes)."""

ROW_COLUMNS = ("row_ids", "weight", "exp_avg", "exp_avg_sq", "row_steps")
"""Fields of a row change that hold so many bytes for each row."""

ID_BYTES = 8

Positions = slice | npt.NDArray[np.int64]

RowChangeT = TypeVar("RowChangeT", row_pb2.AssignRowsRequest, row_pb2.DeleteRowsRequest)


def positions_by_shard(route_map: RouteMap, row_ids: Int64s) -> Iterator[Positions]:
    """Yields for each shard the positions of its ids, in their order: a slice where they lie by shard already."""
    if route_map.num_shards == 1:
        yield slice(0, row_ids.size)
        return
    order, ends = split_by_shard(row_ids, route_map.num_shards)
    start = 0
    for end in ends.tolist():
        yield slice(start, end) if order is None else order[start:end]
        start = end


def check_size(num_bytes: int, max_bytes: int, what: str, shard: int) -> None:
    """Refuses a part that does not fit.

    Raises:
        MessageTooLarge: it does not; nothing was sent.
    """
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"{what}: the part for shard {shard} has {num_bytes} bytes, it may have at most {max_bytes}; use smaller batches, "
            "or more shards; nothing was sent",
            metadata={"shard": str(shard), "size_bytes": str(num_bytes), "max_bytes": str(max_bytes)},
        )


class PushSection(NamedTuple):
    """What a push has for one table.

    Attributes:
        table_id: the table.
        options_index: which of the push's hyper-parameters it uses.
        row_ids: int64 [U], distinct.
        gradients: float32 [U, dim].
    """

    table_id: int
    options_index: int
    row_ids: Int64s
    gradients: Float32s


def split_push(head: PushPart, sections: Sequence[PushSection], route_map: RouteMap, what: str) -> list[PushPart]:
    """Splits a push among the shards; a table with no rows steps, too.

    Args:
        head: hyper-parameters and contribution; its rows are not looked at.
        sections: the tables that step, each once.
        route_map: bucket to shard.
        what: names the push in a message.

    Raises:
        MessageTooLarge: a shard's part is above MAX_PART_BYTES.
    """
    table_ids = [section.table_id for section in sections]
    options_indexes = [section.options_index for section in sections]
    parts = []
    for shard, (row_ids, rows) in enumerate(_rows_by_shard(sections, route_map)):
        ids_payload, rows_payload = Payload(row_ids), Payload(rows)
        check_size(ids_payload.num_bytes + rows_payload.num_bytes, MAX_PART_BYTES, what, shard)
        parts.append(PushPart(head.options, table_ids, options_indexes, ids_payload, rows_payload, head.contribution))
    return parts


def _rows_by_shard(sections: Sequence[PushSection], route_map: RouteMap) -> list[tuple[list[Int64s], list[Float32s]]]:
    """Returns the ids and gradients of each shard, table by table."""
    if route_map.num_shards == 1:
        return [([section.row_ids for section in sections], [section.gradients for section in sections])]
    split: list[tuple[list[Int64s], list[Float32s]]] = [([], []) for _ in range(route_map.num_shards)]
    for _, _, row_ids, gradients in sections:
        for (ids_of_shard, rows_of_shard), place in zip(split, positions_by_shard(route_map, row_ids), strict=True):
            ids_of_shard.append(row_ids[place])
            rows_of_shard.append(gradients[place])
    return split


# -- anew


def split_push_anew(parts: Sequence[PushPart], route_map: RouteMap, *, rows: bool = True) -> list[PushPart]:
    """Puts a push together again and splits it for another route map.

    Args:
        parts: its parts, by shard.
        route_map: the other map.
        rows: False: leave its rows out: its number is closed, or will be, and nothing more is to be applied.

    Raises:
        MessageTooLarge: a part does not fit now.
    """
    head = parts[0]
    kept = parts if rows else ()
    sections = []
    for index, (table_id, options_index) in enumerate(zip(head.table_ids, head.options_indexes, strict=True)):
        none = head.row_ids.arrays[index][:0], head.rows.arrays[index][:0]
        row_ids = np.concatenate([none[0], *(part.row_ids.arrays[index] for part in kept)])
        gradients = np.concatenate([none[1], *(part.rows.arrays[index] for part in kept)])
        sections.append(PushSection(table_id, options_index, row_ids, gradients))
    return split_push(head, sections, route_map, f"push of {len(sections)} tables to {route_map.num_shards} shards")


def split_assign_anew(parts: Sequence[AssignPart], route_map: RouteMap, *, rows: bool = True) -> list[AssignPart]:
    """As split_push_anew, for rows that are written."""
    return [AssignPart(request) for request in _split_rows([part.request for part in parts], route_map, rows)]


def split_delete_anew(parts: Sequence[DeletePart], route_map: RouteMap, *, rows: bool = True) -> list[DeletePart]:
    """As split_push_anew, for rows that are deleted."""
    return [DeletePart(request) for request in _split_rows([part.request for part in parts], route_map, rows)]


def _split_rows(requests: list[RowChangeT], route_map: RouteMap, rows: bool) -> list[RowChangeT]:
    known = {field.name for field in requests[0].DESCRIPTOR.fields}
    names = [name for name in ROW_COLUMNS if name in known and any(getattr(request, name) for request in requests)]
    columns: dict[str, npt.NDArray[np.uint8]] = {}
    num_rows = sum(len(request.row_ids) for request in requests) // ID_BYTES if rows else 0
    for name in names:
        data = b"".join(getattr(request, name) for request in requests) if rows else b""
        columns[name] = np.frombuffer(data, np.uint8).reshape(num_rows, len(data) // max(1, num_rows))
    row_ids = np.frombuffer(columns["row_ids"].tobytes() if "row_ids" in columns else b"", "<i8").astype(np.int64)
    split = []
    for shard, positions in enumerate(positions_by_shard(route_map, row_ids)):
        request = type(requests[0])()
        request.CopyFrom(requests[0])
        for name in names:
            setattr(request, name, columns[name][positions].tobytes())
        what = f"row change of table id {request.table_id} on {route_map.num_shards} shards"
        check_size(HEADER_BYTES + request.ByteSize(), MAX_MESSAGE_BYTES, what, shard)
        split.append(request)
    return split
