"""Writing, deleting and clearing one row: checks what the request says and builds each shard's part."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from shardam_proto.errors import IdOutOfRange, NonFiniteState, WrongShape
from shardam_proto.routing import RouteMap, buckets_of
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.admin.encoding import Float32s
from shardam_server.admin.etags import Precondition, RowTag
from shardam_server.admin.keyed_changes import IdempotencyKey, KeyedClient
from shardam_server.admin.row_changes import Applied, RowChange, run_change
from shardam_server.admin.shard_calls import Request, Response, ShardCalls

Part = TypeVar("Part", row_pb2.AssignRowsRequest, row_pb2.DeleteRowsRequest, row_pb2.ClearMomentsRequest)
"""A shard's part of a change of rows."""


@dataclasses.dataclass(frozen=True)
class RowPlace:
    """A row and where it belongs.

    Attributes:
        table: its table.
        row_id: its id.
        shard: its owner.
        bucket: its bucket.
        route_map: says so; each of its shards takes a part of every change.
    """

    table: common_pb2.TableInfo
    row_id: int
    shard: int
    bucket: int
    route_map: RouteMap


@dataclasses.dataclass(frozen=True)
class RowValues:
    """What a row shall hold.

    Attributes:
        weight: float32 [dim].
        exp_avg: float32 [dim], or None: an old row keeps its own, a new one gets zero.
        exp_avg_sq: as exp_avg.
    """

    weight: Float32s
    exp_avg: Float32s | None = None
    exp_avg_sq: Float32s | None = None


def place_of(calls: ShardCalls, table: common_pb2.TableInfo, row_id: int) -> RowPlace:
    """Finds a row's owner.

    Raises:
        IdOutOfRange: the table is bounded and has no such id.
    """
    spec = table.spec
    if spec.HasField("num_embeddings") and not 0 <= row_id < spec.num_embeddings:
        raise IdOutOfRange(
            f"table {spec.name!r} has num_embeddings={spec.num_embeddings}, so ids are 0 to {spec.num_embeddings - 1}; "
            f"got {row_id}",
            metadata={"table": spec.name, "row_id": str(row_id), "num_embeddings": str(spec.num_embeddings)},
        )
    row_ids = np.array([row_id], np.int64)
    route_map = calls.reader.formed().route_map
    return RowPlace(table, row_id, int(route_map.shards_of(row_ids)[0]), int(buckets_of(row_ids)[0]), route_map)


def as_column(values: Sequence[float], name: str, place: RowPlace) -> Float32s:
    """Checks one component of a row and rounds it to float32, to nearest even.

    Args:
        values: one number per element.
        name: the component: weight, exp_avg or exp_avg_sq.
        place: the row.

    Returns:
        float32 [dim].

    Raises:
        WrongShape: not as many values as the table has dim.
        NonFiniteState: a value is not finite as float32, or exp_avg_sq is negative.
    """
    spec = place.table.spec
    if len(values) != spec.dim:
        raise WrongShape(
            f"{name} has {len(values)} values, table {spec.name!r} has dim {spec.dim}; send one value per element",
            metadata={"table": spec.name, "column": name, "num_values": str(len(values)), "dim": str(spec.dim)},
        )
    with np.errstate(over="ignore"):
        column = np.array(values, np.float64).astype(np.float32)
    bad = ~np.isfinite(column)
    rule = "finite as float32"
    if name == "exp_avg_sq":
        bad |= column < 0
        rule += " and not negative"
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        raise NonFiniteState(
            f"table {spec.name!r}: {name} must be {rule}; of row {place.row_id} its element {position} is {values[position]}; "
            "the row was not changed",
            metadata={"table": spec.name, "row_id": str(place.row_id), "column": name, "position": str(position)},
        )
    return column


@dataclasses.dataclass(frozen=True)
class ChangeTerms:
    """On which terms a row is changed.

    Attributes:
        precondition: what must hold of the row.
        key: under which the change is made once; None: each request is a change of its own.
    """

    precondition: Precondition = dataclasses.field(default_factory=Precondition)
    key: IdempotencyKey | None = None


@dataclasses.dataclass(frozen=True)
class ChangedRow:
    """A change that every shard has taken.

    Attributes:
        tag: the row's new state.
        num_rows: rows changed; 0: there was no such row to be deleted or cleared.
        replayed: an earlier request with the same key made the change.
    """

    tag: RowTag
    num_rows: int
    replayed: bool


def put_row(calls: ShardCalls, place: RowPlace, values: RowValues, terms: ChangeTerms, request_id: int) -> ChangedRow:
    """Writes a row, creating it if it does not exist.

    Raises:
        EtagMismatch: the precondition does not hold; nothing has changed.
        SequenceError: the key was used for another change.
        ShardamError: as run_change.
    """
    parts = _parts(row_pb2.AssignRowsRequest, place, terms)
    part = parts[place.shard]
    part.weight = _column_bytes(values.weight)
    if values.exp_avg is not None:
        part.exp_avg = _column_bytes(values.exp_avg)
    if values.exp_avg_sq is not None:
        part.exp_avg_sq = _column_bytes(values.exp_avg_sq)
    change = RowChange(place.shard, place.route_map, lambda stubs: stubs.rows.AssignRows, parts, terms.precondition)
    applied = _run(calls, change, terms, request_id)
    return _changed(applied, applied.answer.change_number, applied.answer.num_assigned)


def delete_row(calls: ShardCalls, place: RowPlace, terms: ChangeTerms, request_id: int) -> ChangedRow:
    """Deletes a row; one that comes back starts anew.

    Raises:
        EtagMismatch, SequenceError, ShardamError: as put_row.
    """
    parts = _parts(row_pb2.DeleteRowsRequest, place, terms)
    change = RowChange(place.shard, place.route_map, lambda stubs: stubs.rows.DeleteRows, parts, terms.precondition)
    applied = _run(calls, change, terms, request_id)
    return _changed(applied, applied.answer.change_number, applied.answer.num_deleted)


def clear_moments(calls: ShardCalls, place: RowPlace, terms: ChangeTerms, request_id: int) -> ChangedRow:
    """Sets a row's moments to zero, keeping weight and step.

    Raises:
        EtagMismatch, SequenceError, ShardamError: as put_row.
    """
    parts = _parts(row_pb2.ClearMomentsRequest, place, terms)
    change = RowChange(place.shard, place.route_map, lambda stubs: stubs.rows.ClearMoments, parts, terms.precondition)
    applied = _run(calls, change, terms, request_id)
    return _changed(applied, applied.answer.change_number, applied.answer.num_cleared)


def _run(calls: ShardCalls, change: RowChange[Request, Response], terms: ChangeTerms, request_id: int) -> Applied[Response]:
    if terms.key is None:
        return run_change(calls, change, request_id)
    client = KeyedClient(calls, change.route_map, terms.key, request_id)
    client.open(change.subject)
    return client.run(change)


def _changed(applied: Applied[Response], change_number: int, num_rows: int) -> ChangedRow:
    return ChangedRow(RowTag(applied.owner, change_number), num_rows, applied.replayed)


def _parts(message: type[Part], place: RowPlace, terms: ChangeTerms) -> dict[int, Part]:
    """Returns every shard's part of a change of one row: empty, but for the owner's, which names the row."""
    parts = {shard: message(table_id=place.table.table_id) for shard in range(place.route_map.num_shards)}
    owner = parts[place.shard]
    owner.row_ids = np.array([place.row_id], "<i8").tobytes()
    owner.condition.CopyFrom(terms.precondition.to_proto())
    return parts


def _column_bytes(column: Float32s) -> bytes:
    return column.astype("<f4").tobytes()
