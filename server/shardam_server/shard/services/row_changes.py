"""Numbered changes of rows: write, delete, clear moments; unary or on a stream. On the sequencer's thread."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from shardam_proto.errors import GroupMismatch
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.conditions import RowCondition
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.waits import change_passage, require_passage
from shardam_server.shard.records import Int64s
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.services.decoding import check_owned, decode_ids, decode_row_steps, decode_rows
from shardam_server.shard.table import Table

RowChangeRequest = row_pb2.AssignRowsRequest | row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest


class RowChanges:
    """Changes rows of one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    def assign(self, request: row_pb2.AssignRowsRequest) -> row_pb2.AssignRowsResponse:
        """Writes rows, or answers the repeat.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        outcome, repeated = self._run_number(request, lambda origin: self._assign(request, origin))
        return row_pb2.AssignRowsResponse(
            header=self._shard.header(request.header, request.header.number),
            num_assigned=outcome.num_rows,
            repeated_number=repeated,
            change_number=outcome.change_number,
        )

    def _assign(self, request: row_pb2.AssignRowsRequest, origin: Origin) -> Outcome:
        table = self._shard.state.table(request.table_id)
        row_ids = decode_ids(request.row_ids)
        num_rows, dim = row_ids.size, table.spec.dim
        check_owned(self._shard.identity, table, row_ids)
        write = RowWrite(
            row_ids,
            decode_rows(request.weight, num_rows, dim, "weight"),
            decode_rows(request.exp_avg, num_rows, dim, "exp_avg") if request.HasField("exp_avg") else None,
            decode_rows(request.exp_avg_sq, num_rows, dim, "exp_avg_sq") if request.HasField("exp_avg_sq") else None,
            request.if_absent,
            decode_row_steps(request.row_steps, num_rows) if request.HasField("row_steps") else None,
            request.table_step if request.HasField("table_step") else None,
        )
        return self._shard.state.assign(table, write, decode_condition(request.condition), origin)

    def delete(self, request: row_pb2.DeleteRowsRequest) -> row_pb2.DeleteRowsResponse:
        """Deletes rows, or answers the repeat.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        outcome, repeated = self._run_number(request, lambda origin: self._delete(request, origin))
        return row_pb2.DeleteRowsResponse(
            header=self._shard.header(request.header, request.header.number),
            num_deleted=outcome.num_rows,
            repeated_number=repeated,
            change_number=outcome.change_number,
        )

    def _delete(self, request: row_pb2.DeleteRowsRequest, origin: Origin) -> Outcome:
        table, row_ids = self._named_rows(request)
        return self._shard.state.delete(table, row_ids, decode_condition(request.condition), origin)

    def clear_moments(self, request: row_pb2.ClearMomentsRequest) -> row_pb2.ClearMomentsResponse:
        """Sets moments to zero, or answers the repeat.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        outcome, repeated = self._run_number(request, lambda origin: self._clear_moments(request, origin))
        return row_pb2.ClearMomentsResponse(
            header=self._shard.header(request.header, request.header.number),
            num_cleared=outcome.num_rows,
            repeated_number=repeated,
            change_number=outcome.change_number,
        )

    def _clear_moments(self, request: row_pb2.ClearMomentsRequest, origin: Origin) -> Outcome:
        table, row_ids = self._named_rows(request)
        return self._shard.state.clear_moments(table, row_ids, decode_condition(request.condition), origin)

    def _named_rows(self, request: row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest) -> tuple[Table, Int64s]:
        table = self._shard.state.table(request.table_id)
        row_ids = decode_ids(request.row_ids)
        table.check_ids(row_ids)
        check_owned(self._shard.identity, table, row_ids)
        return table, row_ids

    def _run_number(self, request: RowChangeRequest, apply: Callable[[Origin], Outcome]) -> tuple[Outcome, bool]:
        """Runs a row change as the client's number; its content is everything but the header."""
        content = type(request)()
        content.CopyFrom(request)  # type: ignore[arg-type]  # the same type on both sides
        content.header.CopyFrom(common_pb2.RequestHeader())
        digest = type(request).__name__.encode() + xxhash.xxh3_128_digest(content.SerializeToString(deterministic=True))
        origin = Origin(request.header.client_id, request.header.number, digest)

        def change() -> Outcome:
            self._check_step(request.header)
            return apply(origin)

        return self._shard.state.run_number(origin, change)

    def _check_step(self, header: common_pb2.RequestHeader) -> None:
        """Checks that a change which names a step is due.

        Raises:
            NotAMember: its client is a member of no group.
            GroupMismatch: its group has no steps that all members share.
            ShardNotReady: the step before is not carried out here yet (retryable).
        """
        if not header.step:
            return
        entry, member = self._shard.state.groups.require_member(header.client_id)
        if entry.group.terms.mode != "sync":
            raise GroupMismatch(
                f"rank {member.rank} of group {entry.group.name!r} ({entry.group.terms}) changes rows with step {header.step}; "
                "leave it at zero, steps of such a group are its pushes"
            )
        require_passage(change_passage, self._shard.state, header)


def decode_condition(message: row_pb2.RowCondition) -> RowCondition:
    """Converts what a change asks of its rows; an absent message asks nothing."""
    match message.WhichOneof("condition"):
        case "change_number":
            return RowCondition(change_number=message.change_number)
        case "exists":
            return RowCondition(exists=message.exists)
        case _:
            return RowCondition()
