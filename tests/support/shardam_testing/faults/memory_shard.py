"""A shard's state with a journal in memory, without a process around it: what an oracle is held against."""

from __future__ import annotations

import numpy as np

from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table, table_from_info
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.sequence import TABLES
from shardam_testing.matrix import num_threads

DEVICE = CpuDevice(num_threads())


class MemoryJournal:
    """Keeps records as a file would: as bytes."""

    keeps_changes = True

    def __init__(self) -> None:
        self.records: list[tuple[bytes, bytes]] = []

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        """Takes a record."""
        self.records.append((record.SerializeToString(), b"".join(array.tobytes() for array in arrays)))

    def retract(self) -> None:
        """Drops the last record."""
        self.records.pop()

    def fail(self, why: str) -> str:
        """Notes nothing."""
        return why

    async def durable(self) -> None:
        """Everything is, at once."""


class MemoryShard:
    """A shard with the tables of the fault tests.

    Attributes:
        journal: its journal.
        state: its state.
    """

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.state = ShardState(DEVICE)
        self.state.journal = self.journal
        infos = [
            common_pb2.TableInfo(spec=spec.to_proto(), table_id=100 + place, table_seed=7 * place)
            for place, spec in enumerate(TABLES)
        ]
        self.state.install([table_from_info(info, DEVICE.make_records) for info in infos])

    def open(self, *client_ids: bytes) -> None:
        """Opens clients."""
        for client_id in client_ids:
            self.state.open_client(client_id)

    def table(self, name: str) -> Table:
        """Returns a table."""
        table = self.state.find_table(name)
        assert table is not None
        return table

    def oracle(self, last: int | None = None) -> Oracle:
        """Replays the journal, or its records up to one."""
        oracle = Oracle()
        for message, data in self.journal.records[:last]:
            oracle.apply(journal_pb2.JournalRecord.FromString(message), data)
        return oracle

    def rows(self, name: str) -> TableRows:
        """Returns all rows of a table."""
        batch, _ = self.table(name).scan(0, 10**6, include_optimizer=True)
        assert batch.exp_avg is not None
        assert batch.exp_avg_sq is not None
        rows = TableRows(
            batch.row_ids,
            batch.weight,
            batch.exp_avg,
            batch.exp_avg_sq,
            batch.step,
            batch.last_touched_step,
            batch.change_number.astype(np.int64),
        )
        return rows.sorted()
