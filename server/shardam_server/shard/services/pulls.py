"""Pulls, unary or on a stream, whole or of what has changed.

Answers are encoded here, on the threads that read, into the bytes that protobuf would make of them: an answer of 50 MB would
else be copied three times with the interpreter's lock held, while health checks and the renewal of the shard's name wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_proto import wire
from shardam_proto.errors import BadOption
from shardam_proto.sections import SECTIONS_FIELD, STEPS_FIELD, section_columns, step_columns
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.changed_rows import changed_positions
from shardam_server.shard.chunks import Buffer
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.waits import Passage, pull_passage, require_passage
from shardam_server.shard.phases import Laps
from shardam_server.shard.reads import read_at_once, read_tables
from shardam_server.shard.records import Int64s
from shardam_server.shard.services.decoding import check_owned, decode_sections, find_tables
from shardam_server.shard.services.row_answers import Heading, RowAnswer, check_chunk_bytes, check_size, rows_bytes
from shardam_server.shard.table import Table

_ROWS_TAG = b"\x7a"
"""Field 15 of PullResponse, length-delimited."""

_KIND_OF = {
    embedding_pb2.PullRequest: embedding_pb2.ExchangeResponse.DESCRIPTOR.fields_by_name["pull"].number,
    embedding_pb2.PullChangedRequest: embedding_pb2.ExchangeResponse.DESCRIPTOR.fields_by_name["pull_changed"].number,
}
"""Number of the answer's field."""

AT_ONCE_BYTES = 2**16
"""Bytes of rows up to which a pull is answered on the event loop if its tables are free: gathering takes some 10 us then, a hop
to another thread and back ten times as long."""

AT_ONCE_SECTIONS = 32
"""Tables up to which it is: each takes some 10 us whatever its rows, and of more of them the loop would know as of many
rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
    """A pull, found to be of tables of this shard.

    Attributes:
        head: header, sections and chunk_bytes; ids in it are not looked at.
        row_ids: ids of all sections, little-endian int64.
        tables: of the sections.
        num_rows: of the sections.
        rows_bytes: bytes of the weights that it asks for.
    """

    head: embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest
    row_ids: Buffer
    tables: list[Table]
    num_rows: list[int]
    rows_bytes: int


class Pulls:
    """Reads weights of one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    def find(self, head: embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest, row_ids: Buffer) -> Pull:
        """Finds the tables of a pull.

        Raises:
            ShardamError: as find_tables; or its numbers are none that are served.
        """
        sections = list(head.sections)
        tables = find_tables(self._shard.state, sections)
        check_chunk_bytes(head.chunk_bytes)
        if isinstance(head, embedding_pb2.PullChangedRequest) and head.change_number and not head.header.timeline:
            raise BadOption("change numbers are of one timeline; name it in the header of a pull_changed, where it is zero")
        num_rows = [section.num_rows for section in sections]
        return Pull(head, row_ids, tables, num_rows, rows_bytes(_shapes(tables, num_rows)))

    async def read(self, request: embedding_pb2.PullRequest) -> bytes:
        """Reads weights; creates no row. Returns the encoded PullResponse.

        Raises:
            ShardNotReady: it would have to wait for its group, which it can on a stream alone (retryable).
            ShardamError: it is refused.
        """
        passage = require_passage(pull_passage, self._shard.state, request.header)
        if request.chunk_bytes:
            raise BadOption(
                f"answers come in chunks on an Exchange stream alone; leave chunk_bytes out, got {request.chunk_bytes}"
            )
        pull = self.find(request, request.row_ids)
        answer = await read_tables(self._shard, pull.tables, lambda: self._read_message(pull))
        self._note(passage)
        return answer

    async def read_on_stream(self, pull: Pull, passage: Passage, laps: Laps) -> RowAnswer:
        """Reads weights for messages of a stream; creates no row.

        Args:
            pull: the pull.
            passage: on which it need not wait.
            laps: takes its phases.

        Raises:
            ShardamError: it is refused.
        """
        answer = await read_tables(self._shard, pull.tables, lambda: self._read(pull, laps))
        self._note(passage)
        return answer

    def read_at_once(self, pull: Pull, passage: Passage, laps: Laps) -> RowAnswer | None:
        """Reads few weights on the event loop, as read_on_stream; None: they or their tables are many, being changed, or on a
        GPU.
        """
        if pull.rows_bytes > AT_ONCE_BYTES or len(pull.tables) > AT_ONCE_SECTIONS or self._shard.device.name != "cpu":
            return None
        answers = read_at_once(self._shard, pull.tables, lambda: self._read(pull, laps))
        if not answers:
            return None
        self._note(passage)
        return answers[0]

    def _note(self, passage: Passage) -> None:
        if passage.staleness is not None:
            self._shard.metrics.pull_staleness.observe(passage.staleness)

    def _read(self, pull: Pull, laps: Laps) -> RowAnswer:
        """Reads for a stream, under the tables' locks."""
        head = pull.head
        laps.end("wait")
        tables, row_ids, positions = pull.tables, self._decode(pull), None
        if isinstance(head, embedding_pb2.PullChangedRequest):
            row_ids, positions = self._changed(tables, row_ids, head.change_number)
        num_rows = [ids.size for ids in row_ids]
        heading = Heading(_KIND_OF[type(head)], self._header(head.header), _fields(tables, num_rows), positions)
        answer = RowAnswer(heading, _shapes(tables, num_rows), head.chunk_bytes)
        laps.end("decode")
        for section, start, stop, out in answer.places:
            tables[section].gather_into(row_ids[section][start:stop], out)
        laps.end("gather")
        self._count(sum(num_rows))
        return answer

    def _read_message(self, pull: Pull) -> bytes:
        """Reads for a unary call, under the tables' locks."""
        row_ids = self._decode(pull)
        head = embedding_pb2.PullResponse(header=self._header(pull.head.header)).SerializeToString()
        head += _fields(pull.tables, pull.num_rows)
        if pull.rows_bytes:
            head += _ROWS_TAG + wire.varint(pull.rows_bytes)
        check_size(len(head) + pull.rows_bytes)
        parts = [table.gather(ids) for table, ids in zip(pull.tables, row_ids, strict=True)]
        self._count(sum(map(len, parts)))
        # Joining copies large parts without the interpreter's lock.
        return b"".join([head, *(np.ascontiguousarray(part, "<f4").reshape(-1).view(np.uint8).data for part in parts)])

    def _header(self, request: common_pb2.RequestHeader) -> common_pb2.ResponseHeader:
        """Builds an answer's header, under the tables' locks: what the client's last number did is in the rows then."""
        return self._shard.header(request, self._shard.state.clients.last_number(request.client_id))

    def _decode(self, pull: Pull) -> list[Int64s]:
        """Returns the ids of each section; checks them and their routes.

        Raises:
            ShardamError: a section is malformed or misrouted.
        """
        row_ids = decode_sections(pull.num_rows, pull.row_ids)
        for table, ids in zip(pull.tables, row_ids, strict=True):
            table.check_ids(ids)
            check_owned(self._shard.identity, table, ids)
        return row_ids

    def _changed(
        self, tables: Sequence[Table], row_ids: Sequence[Int64s], change_number: int
    ) -> tuple[list[Int64s], npt.NDArray[np.uint32]]:
        """Returns the ids of each section that have changed, and where they stand among all ids."""
        state = self._shard.state
        changed, positions, start = [], [], 0
        for table, ids in zip(tables, row_ids, strict=True):
            if change_number > state.change_number:  # of a state that was lost: nothing can be said of what came after it
                places = np.arange(ids.size)
            else:
                places = changed_positions(table, ids, change_number, known_from=state.loaded_change)
            changed.append(ids[places])
            positions.append(places + start)
            start += ids.size
        return changed, np.concatenate(positions or [np.zeros(0, np.int64)]).astype(np.uint32)

    def _count(self, num_rows: int) -> None:
        self._shard.metrics.pulls.inc()
        self._shard.metrics.rows_pulled.inc(num_rows)


def _shapes(tables: Sequence[Table], num_rows: Sequence[int]) -> list[tuple[int, int]]:
    """Returns rows and dim of each section."""
    return [(count, table.spec.dim) for table, count in zip(tables, num_rows, strict=True)]


def _fields(tables: Sequence[Table], num_rows: Sequence[int]) -> bytes:
    """Encodes steps and sections of an answer with so many rows."""
    table_ids = [table.table_id for table in tables]
    steps = native.encode_messages(STEPS_FIELD, step_columns(table_ids, [table.step for table in tables]))
    return steps + native.encode_messages(SECTIONS_FIELD, section_columns(table_ids, num_rows))
