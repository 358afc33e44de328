"""What changes of a shard's state are made from, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.entries import StagedPart
from shardam_server.shard.records import Float32s
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table

Change = Callable[[ShardState], object]
"""Makes exactly one change."""


def find(state: ShardState, name: str) -> Table:
    table = state.find_table(name)
    assert table is not None, name
    return table


def origin(state: ShardState, client_id: bytes, *, clock: int = 0) -> Origin:
    """The next number of a client, with a digest of its own."""
    entry = state.clients.find(client_id)
    assert entry is not None
    number = entry.last_number + 1
    return Origin(client_id, number, b"digest %d" % number, clock)


def rows(rng: np.random.Generator, num_rows: int, dim: int) -> Float32s:
    return rng.standard_normal((num_rows, dim)).astype(np.float32)


def part_bits(part: StagedPart) -> tuple[object, ...]:
    """All of a staged part, to be compared."""
    tables = [
        (table_id, one.table, one.row_ids.tolist(), one.gradients.tobytes(), one.hyper_parameters, one.peak)
        for table_id, one in part.tables.items()
    ]
    return part.origin, part.group, part.step, part.rank, part.kind, tables
