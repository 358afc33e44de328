"""Which pulls are answered on the event loop."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from shardam_testing.shard_states import make_tables, shard_context

from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.groups.waits import Passage
from shardam_server.shard.phases import Laps
from shardam_server.shard.services.pulls import AT_ONCE_BYTES, AT_ONCE_SECTIONS, Pulls

DIM = 4
FEW_ROWS = AT_ONCE_BYTES // (4 * DIM)


@pytest.mark.parametrize(
    ("num_tables", "num_rows", "at_once"),
    [(1, FEW_ROWS, True), (1, FEW_ROWS + 1, False), (AT_ONCE_SECTIONS, 1, True), (AT_ONCE_SECTIONS + 1, 1, False)],
)
def test_few_rows_of_few_tables_are_read_at_once(num_tables: int, num_rows: int, at_once: bool) -> None:
    async def serve() -> None:
        shard = shard_context(0)
        tables = make_tables([TableSpec(f"t{index}", DIM) for index in range(num_tables)])
        shard.state.install(tables)
        head = embedding_pb2.PullRequest(header=common_pb2.RequestHeader(protocol_version=1, request_id=1))
        for table in tables:
            head.sections.add(table_id=table.table_id, num_rows=num_rows, dtype=common_pb2.DTYPE_FLOAT32)
        pulls = Pulls(shard)
        pull = pulls.find(head, np.arange(num_tables * num_rows, dtype="<i8").tobytes())
        assert (pulls.read_at_once(pull, Passage(), Laps(0.0)) is not None) == at_once
        shard.sequencer.close()

    asyncio.run(serve())
