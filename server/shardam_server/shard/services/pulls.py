"""Pulls, unary or on a stream."""

from __future__ import annotations

from shardam_proto.errors import MessageTooLarge
from shardam_proto.limits import MAX_MESSAGE_BYTES
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.reads import read_tables
from shardam_server.shard.records import Float32s
from shardam_server.shard.services.decoding import FLOAT_BYTES, check_owned, decode_sections, encode, find_tables
from shardam_server.shard.table import Table

ENVELOPE_BYTES = 32
"""Room for the tags and lengths around an answer's rows and around a stream's answer; at most 23 bytes."""


class Pulls:
    """Reads weights of one shard.

    Args:
        shard: the shard.
    """

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    def answer_bytes(self, request: embedding_pb2.PullRequest) -> int:
        """Returns the bytes of the weights that a pull asks for; zero if it is going to be refused.

        Raises:
            ShardamError: as find_tables.
        """
        tables = find_tables(self._shard.state, request.sections)
        return _rows_bytes(tables, request)

    async def fill(self, request: embedding_pb2.PullRequest, response: embedding_pb2.PullResponse) -> None:
        """Reads weights into an answer, which may be part of a larger one; creates no row.

        Raises:
            ShardamError: it is refused.
        """
        tables = find_tables(self._shard.state, request.sections)
        await read_tables(self._shard.sequencer, tables, lambda: self._fill(tables, request, response))

    def _fill(self, tables: list[Table], request: embedding_pb2.PullRequest, response: embedding_pb2.PullResponse) -> None:
        shard = self._shard
        sections = decode_sections(tables, request.sections, request.row_ids)
        for section in sections:
            section.table.check_ids(section.row_ids)
            check_owned(shard.identity, section.table, section.row_ids)
        response.header.CopyFrom(shard.header(request.header))
        response.steps.extend(common_pb2.TableStep(table_id=table.table_id, table_step=table.step) for table in tables)
        response.sections.extend(request.sections)
        size = response.ByteSize() + _rows_bytes(tables, request) + ENVELOPE_BYTES
        if size > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"the answer would have {size} bytes, a message holds at most {MAX_MESSAGE_BYTES}; pull fewer rows at once",
                metadata={"size_bytes": str(size), "max_bytes": str(MAX_MESSAGE_BYTES)},
            )
        parts: list[Float32s] = [section.table.gather(section.row_ids) for section in sections]
        response.rows = b"".join(encode(part) for part in parts)
        shard.metrics.pulls.inc()
        shard.metrics.rows_pulled.inc(sum(len(part) for part in parts))


def _rows_bytes(tables: list[Table], request: embedding_pb2.PullRequest) -> int:
    return FLOAT_BYTES * sum(section.num_rows * table.spec.dim for section, table in zip(request.sections, tables, strict=True))
