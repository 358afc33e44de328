"""Pushes and closed numbers, however they came: one message, chunks of a stream, unary or not."""

from __future__ import annotations

import dataclasses

import xxhash

from shardam_proto.errors import BadOption, WrongShape
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2
from shardam_server.shard.chunks import Buffer, ChunkedPart, PartSizes
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.changes import IncomingPart, Staging, stage
from shardam_server.shard.groups.clocks import check_clock_of_push
from shardam_server.shard.groups.messages import decode_kind, encode_result
from shardam_server.shard.groups.waits import change_passage, require_passage
from shardam_server.shard.option_messages import decode_options
from shardam_server.shard.phases import Laps
from shardam_server.shard.services.decoding import (
    FLOAT_BYTES,
    ID_BYTES,
    check_owned,
    decode_sections,
    find_tables,
    split_rows,
)
from shardam_server.shard.table import GradientSection, Table


@dataclasses.dataclass(frozen=True)
class PushPart:
    """A whole part.

    Attributes:
        head: header, options, sections and contribution; ids and gradients in it are not looked at.
        row_ids: ids of all sections, little-endian int64.
        rows: gradients of all sections, little-endian float32.
    """

    head: embedding_pb2.PushRequest
    row_ids: Buffer
    rows: Buffer

    @classmethod
    def of_message(cls, head: embedding_pb2.PushRequest, row_ids: Buffer, rows: Buffer) -> PushPart:
        """Returns the part that came as one message.

        Raises:
            BadOption: it has what only chunks have.
        """
        if head.total_bytes:
            raise BadOption(f"total_bytes is for parts in chunks; one message leaves it at zero, got {head.total_bytes}")
        return cls(head, row_ids, rows)

    @classmethod
    def of_chunks(cls, part: ChunkedPart) -> PushPart:
        """Returns the part that came in chunks; its ids and gradients are views of the part's buffer."""
        return cls(part.head, part.row_ids, part.rows)

    def digest(self) -> bytes:
        """Returns the digest of the content: options, sections, ids and gradients, and in a group what the part is to its step;
        not how or when it came.
        """
        digest = xxhash.xxh3_128()
        step, kind = self.head.header.step, b"push"
        if step:
            kind = b"step"
            digest.update(f"{step} {self.head.contribution}\n".encode())
        messages = (*self.head.options, *self.head.sections)  # none has a map, whose order would have to be settled
        digest.update(b"".join([message.SerializeToString() + b"\n" for message in messages]))
        digest.update(self.row_ids)
        digest.update(self.rows)
        return kind + digest.digest()


class Pushes:
    """Applies parts to one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    def apply(self, part: PushPart, laps: Laps) -> embedding_pb2.PushResponse:
        """Applies a part, stages it for its step, or answers its repeat; on the sequencer's thread.

        Args:
            part: the part.
            laps: takes its phases.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        shard, header = self._shard, part.head.header
        laps.end("wait")
        shard.state.laps = laps
        try:
            staging = self._stage(part) if self._is_of_step(header) else self._push(part)
        finally:
            shard.state.laps = Laps(0.0)  # the laps of other changes are nobody's
        outcome = staging.outcome
        if not staging.repeated and (outcome is None or outcome.result is None):
            shard.metrics.pushes.inc()
            shard.metrics.rows_pushed.inc(len(part.row_ids) // ID_BYTES)
        return embedding_pb2.PushResponse(
            header=shard.header(header, header.number),
            steps=[] if outcome is None else _table_steps(outcome),
            repeated_number=staging.repeated,
            staged=outcome is None,
            peaks=[group_pb2.TablePeak(table_id=table_id, peak=peak) for table_id, peak in staging.peaks.items()],
            result=None if outcome is None else encode_result(outcome.result),
        )

    def _is_of_step(self, header: common_pb2.RequestHeader) -> bool:
        """Whether a part contributes to a step of a sync group, or did: its client may be no member any more."""
        groups = self._shard.state.groups
        found, staged = groups.of_client(header.client_id), groups.part(header.client_id)
        if not header.step:
            return False
        return staged is not None if found is None else found[0].group.terms.mode == "sync"

    def _push(self, part: PushPart) -> Staging:
        """Applies a part on its arrival: that of a bounded group's member, or of a client without a group."""
        state, head = self._shard.state, part.head
        origin = Origin(head.header.client_id, head.header.number, part.digest(), head.header.step)

        def apply() -> Outcome:
            check_clock_of_push(state, head.header)
            if head.contribution:
                raise BadOption(
                    f"a push says what it contributes (here {head.contribution}) only to a step of a sync group; leave it out"
                )
            sections = self._sections(part)
            state.laps.end("decode")
            return state.push(sections, origin)

        outcome, repeated = state.run_number(origin, apply)
        return Staging({}, outcome, repeated)

    def _stage(self, part: PushPart) -> Staging:
        """Keeps a part until its step is decided."""
        state, head = self._shard.state, part.head
        header, kind = head.header, decode_kind(head.contribution)
        if kind != "gradient" and head.sections:
            raise BadOption(f"an {kind} contribution has no gradients, got {len(head.sections)} sections; leave them out")
        origin = Origin(header.client_id, header.number, part.digest())
        staged = state.groups.part(header.client_id)
        known = state.clients.former(origin) is not None or (staged is not None and staged.origin.number == header.number)
        sections = [] if known else self._sections(part)  # a repeat is answered whatever has become of tables and routes
        state.laps.end("decode")
        staging = stage(state, IncomingPart(origin, header.step, header.rank, kind, sections))
        state.laps.end("merge")
        return staging

    def close_number(self, request: embedding_pb2.CloseNumberRequest) -> embedding_pb2.CloseNumberResponse:
        """Uses a number up without its change, or answers the repeat; on the sequencer's thread. With the step of a bounded
        group's member it stands for a push.

        Raises:
            ShardamError: it is refused; nothing has changed.
        """
        shard, header, kind = self._shard, request.header, request.kind
        if kind not in (embedding_pb2.CLOSE_KIND_SKIP, embedding_pb2.CLOSE_KIND_VOID):
            raise BadOption(f"kind must be SKIP or VOID, got {kind}")
        if kind == embedding_pb2.CLOSE_KIND_SKIP and request.table_ids:
            raise BadOption("SKIP steps no table; table_ids must be empty")
        table_ids = list(request.table_ids)
        found = shard.state.groups.of_client(header.client_id)
        clock = header.step if found is not None and found[0].group.terms.mode == "bounded" else 0
        content = f"close {kind} {sorted(table_ids)}" + (f" step {clock}" if clock else "")
        origin = Origin(header.client_id, header.number, content.encode(), clock)

        def close() -> Outcome:
            if header.step:  # in a bounded group: a push is closed, not a row change
                check_clock_of_push(shard.state, header)
                require_passage(change_passage, shard.state, header)
            return shard.state.void(table_ids, origin)

        outcome, repeated = shard.state.run_number(origin, close)
        return embedding_pb2.CloseNumberResponse(
            header=shard.header(header, header.number), steps=_table_steps(outcome), repeated_number=repeated
        )

    def check_first_chunk(self, request: embedding_pb2.PushRequest) -> PartSizes:
        """Checks the form of a part by its chunk 0 and returns what its sections need.

        Raises:
            ShardamError: an unknown table, a malformed section, or another total than the sections need.
        """
        tables = self._tables(request)
        num_rows = [section.num_rows for section in request.sections]
        sizes = PartSizes(
            row_ids_bytes=sum(num_rows) * ID_BYTES,
            rows_bytes=sum(rows * table.spec.dim for rows, table in zip(num_rows, tables, strict=True)) * FLOAT_BYTES,
        )
        if request.total_bytes != sizes.total_bytes:
            raise WrongShape(f"total_bytes is {request.total_bytes}, the sections need {sizes.total_bytes} for ids and rows")
        return sizes

    def _tables(self, head: embedding_pb2.PushRequest) -> list[Table]:
        """Returns the table of each section of a part whose head is well formed.

        Raises:
            ShardamError: it is not.
        """
        sections = list(head.sections)
        tables = find_tables(self._shard.state, sections)
        if len({table.table_id for table in tables}) != len(tables):
            raise WrongShape("a push names a table in two sections; merge them into one")
        num_options = len(head.options)
        for table, section in zip(tables, sections, strict=True):
            if section.options_index >= num_options:
                raise BadOption(
                    f"table {table.spec.name!r}: options_index {section.options_index} lies outside the push's "
                    f"{len(head.options)} options"
                )
        return tables

    def _sections(self, part: PushPart) -> list[GradientSection]:
        """Checks a part's form and routes.

        Raises:
            ShardamError: a section is malformed or misrouted.
        """
        shard, head = self._shard, part.head
        sections = list(head.sections)
        tables, num_rows = self._tables(head), [section.num_rows for section in sections]
        row_ids = decode_sections(num_rows, part.row_ids)
        options = [(decode_options(message), message.grad_scale) for message in head.options]
        gradients = split_rows(tables, num_rows, part.rows)
        for table, ids in zip(tables, row_ids, strict=True):
            table.check_ids(ids)
            check_owned(shard.identity, table, ids)
        used = [options[section.options_index] for section in sections]
        columns = zip(tables, row_ids, gradients, used, strict=True)
        return [GradientSection(table, ids, rows, *pair) for table, ids, rows, pair in columns]


def _table_steps(outcome: Outcome) -> list[common_pb2.TableStep]:
    steps = outcome.steps if outcome.result is None else outcome.result.steps
    return [common_pb2.TableStep(table_id=table_id, table_step=step) for table_id, step in steps.items()]
