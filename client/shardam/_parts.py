"""Splits a change among the shards: one part each, empty ones too, checked to fit before anything is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from shardam._arrays import Float32s, Int64s, to_wire
from shardam._changes import Change
from shardam._messages import AssignPart, DeletePart, Payload, PushPart
from shardam._split import (
    HEADER_BYTES,
    PushSection,
    check_size,
    positions_by_shard,
    split_assign_anew,
    split_delete_anew,
    split_push,
    split_push_anew,
)
from shardam_kernels.factors import AdamOptions
from shardam_proto.limits import MAX_MESSAGE_BYTES
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, row_pb2

PushChange = Change[PushPart, embedding_pb2.PushResponse]
AssignChange = Change[AssignPart, row_pb2.AssignRowsResponse]
DeleteChange = Change[DeletePart, row_pb2.DeleteRowsResponse]


@dataclasses.dataclass(frozen=True)
class TableStepGradient:
    """One table's merged gradient of one optimizer step; nobody writes to its arrays any more.

    Attributes:
        table: the table's name.
        table_id: its id.
        row_ids: int64 [U], distinct.
        gradients: float32 [U, dim].
        options: hyper-parameters.
        grad_scale: loss scale of the gradients.
    """

    table: str
    table_id: int
    row_ids: Int64s
    gradients: Float32s
    options: AdamOptions
    grad_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class RowWrite:
    """Rows to be written.

    Attributes:
        row_ids: int64 [N], distinct.
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim], or None: an old row keeps its own, a new one gets zero.
        exp_avg_sq: as exp_avg.
        if_absent: leave rows that exist as they are.
        row_steps: uint32 [N], where rows count their own steps; None: an old row keeps its own, a new one gets zero.
        table_step: the table's step afterwards, where it is zero or this one; None: it stays.
    """

    row_ids: Int64s
    weight: Float32s
    exp_avg: Float32s | None
    exp_avg_sq: Float32s | None
    if_absent: bool = False
    row_steps: npt.NDArray[np.uint32] | None = None
    table_step: int | None = None


def push_change(sections: Sequence[TableStepGradient], route_map: RouteMap) -> PushChange:
    """Builds the push of one optimizer step, to be applied on arrival.

    Raises:
        MessageTooLarge: as push_parts.
    """
    parts = push_parts(sections, route_map)
    return Change(parts, route_map, split_push_anew, PushPart.answer, _stepped, contributes=True)


def push_parts(
    sections: Sequence[TableStepGradient],
    route_map: RouteMap,
    contribution: group_pb2.ContributionKind.ValueType = group_pb2.CONTRIBUTION_KIND_UNSPECIFIED,
) -> list[PushPart]:
    """Builds the parts of one optimizer step, by shard; a table with no rows steps, too.

    Args:
        sections: the tables that step, each once.
        route_map: bucket to shard.
        contribution: in a sync group: what the step contributes.

    Raises:
        MessageTooLarge: a shard's part is above MAX_PART_BYTES.
    """
    places: dict[tuple[AdamOptions, float], int] = {}
    split = []
    used: tuple[AdamOptions, float] | None = None
    for section in sections:
        if used is None or section.options is not used[0] or section.grad_scale != used[1]:  # one optimizer's tables share them
            used = section.options, section.grad_scale
            place = places.setdefault(used, len(places))
        split.append(PushSection(section.table_id, place, section.row_ids, section.gradients))
    head = PushPart(
        options=[options_message(*pair) for pair in places],
        table_ids=[],
        options_indexes=[],
        row_ids=Payload([]),
        rows=Payload([]),
        contribution=contribution,
    )
    return split_push(head, split, route_map, f"push of {_tables(section.table for section in sections)}")


def _stepped(answer: embedding_pb2.PushResponse) -> list[int]:
    return [step.table_id for step in answer.steps]


def assign_change(table: str, table_id: int, write: RowWrite, route_map: RouteMap) -> AssignChange:
    """Builds the writing of rows.

    Raises:
        MessageTooLarge: a shard's part does not fit a message.
    """
    what = f"assign of table {table!r}"
    parts = []
    for shard, positions in enumerate(positions_by_shard(route_map, write.row_ids)):
        row_ids = write.row_ids[positions]
        columns: dict[str, npt.NDArray[np.generic] | None] = {
            "weight": write.weight,
            "exp_avg": write.exp_avg,
            "exp_avg_sq": write.exp_avg_sq,
            "row_steps": write.row_steps,
        }
        present = {name: values[positions] for name, values in columns.items() if values is not None}
        num_bytes = HEADER_BYTES + row_ids.nbytes + sum(values.nbytes for values in present.values())
        check_size(num_bytes, MAX_MESSAGE_BYTES, what, shard)
        wire = {name: to_wire(values) for name, values in present.items()}
        part = row_pb2.AssignRowsRequest(
            table_id=table_id,
            if_absent=write.if_absent,
            row_ids=to_wire(row_ids),
            weight=wire["weight"],
            exp_avg=wire.get("exp_avg"),
            exp_avg_sq=wire.get("exp_avg_sq"),
            row_steps=wire.get("row_steps"),
            table_step=write.table_step,
        )
        parts.append(AssignPart(part))
    return Change(parts, route_map, split_assign_anew, AssignPart.answer, lambda _: [])


def delete_change(table: str, table_id: int, row_ids: Int64s, route_map: RouteMap) -> DeleteChange:
    """Builds the deletion of rows.

    Raises:
        MessageTooLarge: a shard's part does not fit a message.
    """
    what = f"delete of table {table!r}"
    parts = []
    for shard, positions in enumerate(positions_by_shard(route_map, row_ids)):
        mine = row_ids[positions]
        check_size(HEADER_BYTES + mine.nbytes, MAX_MESSAGE_BYTES, what, shard)
        parts.append(DeletePart(row_pb2.DeleteRowsRequest(table_id=table_id, row_ids=to_wire(mine))))
    return Change(parts, route_map, split_delete_anew, DeletePart.answer, lambda _: [])


def options_message(options: AdamOptions, grad_scale: float) -> common_pb2.AdamOptions:
    """Converts hyper-parameters to their message."""
    return common_pb2.AdamOptions(
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        eps=options.eps,
        weight_decay=options.weight_decay,
        decoupled_weight_decay=options.decoupled_weight_decay,
        maximize=options.maximize,
        grad_scale=grad_scale,
    )


def options_value(message: common_pb2.AdamOptions) -> AdamOptions:
    """Converts hyper-parameters from their message."""
    return AdamOptions(
        lr=message.lr,
        betas=(message.beta1, message.beta2),
        eps=message.eps,
        weight_decay=message.weight_decay,
        decoupled_weight_decay=message.decoupled_weight_decay,
        maximize=message.maximize,
    )


def _tables(names: Iterator[str]) -> str:
    listed = [repr(name) for name in names]
    return f"table {listed[0]}" if len(listed) == 1 else f"{len(listed)} tables"
