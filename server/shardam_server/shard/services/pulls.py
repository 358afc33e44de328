"""Pulls, unary or on a stream.

Answers are encoded here, on the threads that read, into the bytes that protobuf would make of them: an answer of 50 MB would
else be copied three times with the interpreter's lock held, while health checks and the renewal of the shard's name wait.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from shardam_proto.errors import MessageTooLarge
from shardam_proto.limits import MAX_MESSAGE_BYTES
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.chunks import Buffer
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.waits import Passage, pull_passage, require_passage
from shardam_server.shard.reads import read_tables
from shardam_server.shard.records import Float32s
from shardam_server.shard.services.decoding import FLOAT_BYTES, check_owned, decode_sections, find_tables
from shardam_server.shard.table import Table

_ROWS = embedding_pb2.PullResponse.DESCRIPTOR.fields_by_name["rows"].number
_REQUEST_ID = embedding_pb2.ExchangeResponse.DESCRIPTOR.fields_by_name["request_id"].number
_PULL = embedding_pb2.ExchangeResponse.DESCRIPTOR.fields_by_name["pull"].number

_VARINT, _LENGTH_DELIMITED = 0, 2
"""Wire types of protobuf's encoding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
    """A pull.

    Attributes:
        head: header, sections and chunk_bytes; ids in it are not looked at.
        row_ids: ids of all sections, little-endian int64.
    """

    head: embedding_pb2.PullRequest
    row_ids: Buffer


class Pulls:
    """Reads weights of one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    def answer_bytes(self, request: embedding_pb2.PullRequest) -> int:
        """Returns the bytes of the weights that a pull asks for.

        Raises:
            ShardamError: as find_tables.
        """
        return _rows_bytes(find_tables(self._shard.state, request.sections), request)

    async def read(self, request: embedding_pb2.PullRequest) -> bytes:
        """Reads weights; creates no row. Returns the encoded PullResponse.

        Raises:
            ShardNotReady: it would have to wait for its group, which it can on a stream alone (retryable).
            ShardamError: it is refused.
        """
        passage = require_passage(pull_passage, self._shard.state, request.header)
        return await self._answer(Pull(request, request.row_ids), passage, on_stream=False)

    async def read_on_stream(self, pull: Pull, passage: Passage) -> bytes:
        """Reads weights as `read`, but returns the encoded ExchangeResponse.

        Args:
            pull: the pull.
            passage: on which it need not wait.

        Raises:
            ShardamError: it is refused.
        """
        return await self._answer(pull, passage, on_stream=True)

    async def _answer(self, pull: Pull, passage: Passage, *, on_stream: bool) -> bytes:
        tables = find_tables(self._shard.state, pull.head.sections)
        answer = await read_tables(self._shard, tables, lambda: self._read(tables, pull, on_stream))
        if passage.staleness is not None:
            self._shard.metrics.pull_staleness.observe(passage.staleness)
        return answer

    def _read(self, tables: list[Table], pull: Pull, on_stream: bool) -> bytes:
        shard, request = self._shard, pull.head
        sections = decode_sections(tables, request.sections, pull.row_ids)
        for section in sections:
            section.table.check_ids(section.row_ids)
            check_owned(shard.identity, section.table, section.row_ids)
        head = embedding_pb2.PullResponse(
            header=shard.header(request.header),
            steps=[common_pb2.TableStep(table_id=table.table_id, table_step=table.step) for table in tables],
            sections=request.sections,
        ).SerializeToString()
        rows_bytes = _rows_bytes(tables, request)
        if rows_bytes:
            head += _varint(_ROWS << 3 | _LENGTH_DELIMITED) + _varint(rows_bytes)
        size = len(head) + rows_bytes
        if on_stream:
            request_id = _varint(_REQUEST_ID << 3 | _VARINT) + _varint(request.header.request_id)
            head = request_id + _varint(_PULL << 3 | _LENGTH_DELIMITED) + _varint(size) + head
            size = len(head) + rows_bytes
        if size > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"the answer would have {size} bytes, a message holds at most {MAX_MESSAGE_BYTES}; pull fewer rows at once",
                metadata={"size_bytes": str(size), "max_bytes": str(MAX_MESSAGE_BYTES)},
            )
        parts: list[Float32s] = [section.table.gather(section.row_ids) for section in sections]
        shard.metrics.pulls.inc()
        shard.metrics.rows_pulled.inc(sum(len(part) for part in parts))
        return b"".join([head, *(_bytes_of(part) for part in parts)])  # copies large parts without the interpreter's lock


def _bytes_of(rows: Float32s) -> memoryview:
    """Views rows as little-endian bytes."""
    return np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8).data


def _rows_bytes(tables: list[Table], request: embedding_pb2.PullRequest) -> int:
    return FLOAT_BYTES * sum(section.num_rows * table.spec.dim for section, table in zip(request.sections, tables, strict=True))


def _varint(value: int) -> bytes:
    """Encodes an unsigned integer as protobuf does: 7 bits a byte, the low ones first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
