"""Shard states without processes: a journal in memory, tables, and everything that two equal states have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardam_proto.registry import ClusterEntry
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, journal_pb2, shard_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.journal.interface import Arrays, NoJournal
from shardam_server.shard.journal.replay import Replay
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table, table_from_info
from shardam_server.shard.tenure import Tenure
from shardam_testing.matrix import num_threads

SEED = 77

LONG_LEASE_S = 3600.0
"""No test oversleeps it."""

Record = tuple[journal_pb2.JournalRecord, bytes]


class MemoryJournal(NoJournal):
    """Keeps records as a file would: as bytes."""

    keeps_changes = True

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        assert all(array.flags.c_contiguous for array in arrays)
        self.frames.append((record.SerializeToString(), b"".join(array.tobytes() for array in arrays)))

    def retract(self) -> None:
        self.frames.pop()

    def fail(self, why: str) -> str:
        return f"{why}; start the shard again"

    def records(self) -> list[Record]:
        return [(journal_pb2.JournalRecord.FromString(message), data) for message, data in self.frames]


def journaled_state() -> tuple[ShardState, MemoryJournal]:
    """Returns an empty state and its journal."""
    state, journal = ShardState(CpuDevice(num_threads())), MemoryJournal()
    state.journal = journal
    return state, journal


def replayed(records: Iterable[Record]) -> ShardState:
    """Returns the state that records lead to."""
    state = ShardState(CpuDevice(num_threads()))
    replay = Replay(state, CpuDevice(num_threads()).make_records)
    for record, data in records:
        replay.apply(record, data)
    return state


def make_tables(specs: Sequence[TableSpec]) -> list[Table]:
    """Returns empty tables with the ids 1, 2, ..."""
    infos = [
        common_pb2.TableInfo(spec=spec.to_proto(), table_id=table_id, table_seed=SEED) for table_id, spec in enumerate(specs, 1)
    ]
    return [table_from_info(info, CpuDevice(num_threads()).make_records) for info in infos]


def shard_context(index: int, state: ShardState | None = None, *, num_shards: int = 1) -> ShardContext:
    """Returns a shard that serves, without a network; on an event loop."""
    shard = ShardContext(
        identity=ShardIdentity(index, cluster=ClusterEntry("c1", num_shards, seed=0), route_map=RouteMap(1, num_shards)),
        state=state or ShardState(CpuDevice(num_threads())),
        sequencer=Sequencer(),
        metrics=ShardMetrics("c", index),
        device=CpuDevice(num_threads()),
        tenure=Tenure(LONG_LEASE_S),
    )
    shard.serving = shard_pb2.SERVING_STATE_SERVING
    return shard


def table_steps(state: ShardState) -> dict[int, int]:
    return {table.table_id: table.step for table in state.tables()}


def seen(state: ShardState, row_ids: Sequence[int]) -> Mapping[str, object]:
    """Returns all that a state shows: steps, rows with optimizer state and counters, clients with outcomes."""
    ids = np.array(row_ids, np.int64)
    rows = {}
    for table in state.tables():
        batch = table.read(ids, include_optimizer=True)
        assert batch.exp_avg is not None
        assert batch.exp_avg_sq is not None
        columns = (batch.found, batch.weight, batch.exp_avg, batch.exp_avg_sq)
        counters = (batch.step, batch.last_touched_step, batch.change_number)
        rows[table.spec.name] = table.num_rows, [column.tobytes() for column in (*columns, *counters)]
    clients = {
        client_id: (entry.last_number, entry.closed, entry.settled, entry.heartbeats, list(entry.outcomes.items()))
        for client_id, entry in state.clients
    }
    return {
        "change_number": state.change_number,
        "steps": table_steps(state),
        "rows": rows,
        "clients": clients,
        "num_open": state.clients.num_open,
    }
