"""Snapshots that are copied a record at a time between changes of every kind, against full copies taken at their cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import OutOfMemory
from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.journal.base_records import client_record, table_message
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.records import Device
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.snapshots import Snapshot
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table
from shardam_testing.full_device import FullDevice
from shardam_testing.shard_histories import make_tables
from shardam_testing.state_changes import origin, rows

CLIENT = b"s" * 16
NUM_IDS = 30
"""Ids that changes pick from: few, so that rows are changed, deleted and made again while they are copied."""

NUM_GROWN = 200
"""New rows that make an index grow while it is copied."""

MAX_OPEN = 3

Rows = dict[tuple[str, int], tuple[bytes, ...]]
"""Table and id -> each column's bytes."""


def rows_of(state: ShardState) -> Rows:
    """All rows of a state, read at once."""
    found: Rows = {}
    for table in state.tables():
        row_ids, key = table.storage.scan(0, 10**6)
        assert key is None
        copies = table.storage.copy_rows(row_ids, table.storage.lookup(row_ids))
        counters = copies.counters
        columns = (copies.weight, copies.exp_avg, copies.exp_avg_sq, counters.row_step.astype(np.uint32))
        _put(found, table.spec.name, row_ids, [*columns, counters.touched_step, counters.change_number])
    return found


def _put(found: Rows, name: str, row_ids: np.ndarray[tuple[int], np.dtype[np.int64]], columns: Arrays) -> None:
    for place, row_id in enumerate(row_ids.tolist()):
        assert (name, row_id) not in found, f"row {row_id} of {name} comes twice"
        found[name, row_id] = tuple(column[place].tobytes() for column in columns)


class Copying:
    """A snapshot that is being copied, and what it has to give."""

    def __init__(self, state: ShardState) -> None:
        self.snapshot = Snapshot(state)
        self._records = self.snapshot.records(parts=True)
        self._names = {table.table_id: table.spec.name for table in state.tables()}
        self._expected = rows_of(state)
        self._tables = [table_message(table).SerializeToString() for table in state.tables()]
        self._clients = [client_record(client_id, entry)[0].SerializeToString() for client_id, entry in state.clients]
        self._change_number = state.change_number
        self._found: Rows = {}
        self._others: list[journal_pb2.BaseRecord] = []

    def copy(self, num_records: int) -> bool:
        """Copies so many records; returns whether there are more."""
        for _ in range(num_records):
            one = next(self._records, None)
            if one is None:
                return False
            record, arrays = one
            if record.WhichOneof("part") == "rows":
                row_ids = np.asarray(arrays[0], np.int64)
                assert row_ids.size == record.rows.num_rows
                _put(self._found, self._names[record.rows.table_id], row_ids, arrays[1:])
            else:
                self._others.append(record)
        return True

    @property
    def half_way(self) -> bool:
        """Some rows are copied, and there are more."""
        return bool(self._found) and not self.snapshot.closed

    def check(self) -> None:
        """Copies the rest and compares."""
        while self.copy(10**6):
            pass
        assert self.snapshot.closed
        assert self.snapshot.pre_image_bytes == 0
        assert self.snapshot.change_number == self._change_number
        assert self.snapshot.num_rows == len(self._expected)
        assert self._found == self._expected
        tables = [common_pb2.TableInfo.SerializeToString(one.table) for one in self._others if one.HasField("table")]
        assert tables == self._tables
        assert [one.SerializeToString() for one in self._others if one.HasField("client")] == self._clients
        assert self._others[-1].end == journal_pb2.BaseEnd(num_rows=len(self._expected), num_clients=len(self._clients))


class Interleaving:
    """A state, its open snapshots, and what may happen next, each chosen by a seed."""

    def __init__(self, device: Device) -> None:
        self.state = ShardState(device)
        self.state.install(make_tables(device))
        self.state.open_client(CLIENT)
        self.num_kept_half_way = self.num_refused = 0
        self._device = device
        self._open: list[Copying] = []
        self._ways: dict[str, Callable[[np.random.Generator], object]] = {
            "push": self._push,
            "assign": self._assign,
            "delete": self._delete,
            "clear": self._clear,
            "grow": self._grow,
            "no room": self._no_room,
            "step": self._step,
            "cut": self._cut,
            "copy": self._copy,
            "give up": self._give_up,
        }
        for seed in range(4):  # the first cut has rows
            self._push(np.random.default_rng(seed))

    @property
    def kinds(self) -> Sequence[str]:
        """What may happen, the more often named the more often."""
        more = {"push": 4, "assign": 2, "delete": 2, "copy": 5}
        return [kind for kind in self._ways for _ in range(more.get(kind, 1))]

    def run(self, kind: str, seed: int) -> None:
        """Lets one thing happen."""
        before, half_way = self.state.snapshots.kept_bytes, any(copying.half_way for copying in self._open)
        self._ways[kind](np.random.default_rng(seed))
        self.num_kept_half_way += half_way and self.state.snapshots.kept_bytes > before

    def finish(self) -> None:
        """Copies and checks what is open, the newest first."""
        for copying in reversed(self._open):
            copying.check()
        assert self.state.snapshots.kept_bytes == 0

    def _cut(self, rng: np.random.Generator) -> None:
        if len(self._open) == MAX_OPEN:
            self._open.pop(int(rng.integers(MAX_OPEN))).check()
        self._open.append(Copying(self.state))

    def _copy(self, rng: np.random.Generator) -> None:
        if self._open:
            self._open[int(rng.integers(len(self._open)))].copy(int(rng.integers(1, 8)))

    def _give_up(self, rng: np.random.Generator) -> None:
        if self._open:
            self._open.pop(int(rng.integers(len(self._open)))).snapshot.close()

    def _origin(self, rng: np.random.Generator) -> Origin | None:
        return origin(self.state, CLIENT) if rng.integers(2) else None

    def _table(self, rng: np.random.Generator) -> Table:
        tables = self.state.tables()
        return tables[int(rng.integers(len(tables)))]

    @staticmethod
    def _ids(rng: np.random.Generator, table: Table, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        ids = rng.integers(0, NUM_IDS, count)
        return ids if table.spec.num_embeddings is not None else ids * 2**40 - 2**43

    def _distinct(self, rng: np.random.Generator, table: Table) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.unique(self._ids(rng, table, int(rng.integers(1, 12))))

    def _push(self, rng: np.random.Generator) -> None:
        tables = [table for table in self.state.tables() if rng.integers(2)]
        options, sections = AdamOptions(lr=float(rng.uniform(0.01, 0.1)), weight_decay=0.01), []
        for table in tables:
            ids = self._ids(rng, table, int(rng.integers(0, 12)))
            sections.append(GradientSection(table, ids, rows(rng, ids.size, table.spec.dim), options, 2.0))
        self.state.push(sections, self._origin(rng))

    def _grow(self, rng: np.random.Generator) -> None:
        table = self.state.tables()[int(rng.integers(2)) * 3]  # the unbounded ones are the first and the last by name
        assert table.spec.num_embeddings is None
        ids = rng.integers(-(2**62), 2**62, NUM_GROWN)
        gradients = rows(rng, ids.size, table.spec.dim)
        self.state.push([GradientSection(table, ids, gradients, AdamOptions(lr=0.1), 1.0)])

    def _assign(self, rng: np.random.Generator) -> None:
        table = self._table(rng)
        ids = self._distinct(rng, table)
        weight, exp_avg, exp_avg_sq = (rows(rng, ids.size, table.spec.dim) for _ in range(3))
        moments = bool(rng.integers(2))
        by_row = table.spec.step == "row" and bool(rng.integers(2))
        write = RowWrite(
            ids,
            weight,
            exp_avg if moments else None,
            exp_avg_sq**2 if moments else None,
            bool(rng.integers(2)),
            rng.integers(0, 50, ids.size).astype(np.uint32) if by_row else None,
        )
        self.state.assign(table, write, origin=self._origin(rng))

    def _delete(self, rng: np.random.Generator) -> None:
        table = self._table(rng)
        self.state.delete(table, self._ids(rng, table, int(rng.integers(1, 12))), origin=self._origin(rng))

    def _clear(self, rng: np.random.Generator) -> None:
        table = self._table(rng)
        self.state.clear_moments(table, self._ids(rng, table, int(rng.integers(1, 12))), origin=self._origin(rng))

    def _step(self, rng: np.random.Generator) -> None:
        table = self._table(rng)
        self.state.raise_steps({table.table_id: table.step + int(rng.integers(1, 4))})

    def _no_room(self, rng: np.random.Generator) -> None:
        """A change that may find no room half-way, and is then taken back."""
        device = self._device
        if not isinstance(device, FullDevice):
            return
        device.fails_at = str(rng.choice(["reserve", "initialize", "stage", "write", "read"]))
        device.calls_left = int(rng.integers(0, 3))
        change = [self._push, self._assign, self._delete, self._clear][int(rng.integers(4))]
        before = self.state.change_number, self.state.snapshots.kept_bytes
        try:
            change(rng)
        except OutOfMemory:
            self.num_refused += 1
            assert (self.state.change_number, self.state.snapshots.kept_bytes) == before
        finally:
            device.fails_at = ""
