"""A shard's state from its journal, through the NumPy kernels and the recorded factors alone: what its live rows must equal.

It also keeps the books of PROTOCOL.md, section 4: which client's which number was applied, each once and in order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_proto.v1 import journal_pb2
from shardam_testing.faults.oracle_groups import KINDS, OracleGroups, Part, PartTable, is_refused, merged_by_rank, unscaled
from shardam_testing.faults.oracle_table import (
    Float32s,
    Int64s,
    OracleTable,
    RecordedRows,
    TableRows,
    UnscaledGradient,
    read_factors,
)


@dataclasses.dataclass(frozen=True)
class Applied:
    """A numbered change.

    Attributes:
        client_id: whose.
        number: its number.
        kind: the record's field: "push", "close", "assign", ...
        after_end: it was closed by home for a client that had ended.
        clock: the client's clock after it, of a push in a bounded group; 0: none.
    """

    client_id: bytes
    number: int
    kind: str
    after_end: bool
    clock: int = 0


@dataclasses.dataclass
class OracleClient:
    """A client's books on one shard."""

    last_number: int = 0
    ended: bool = False
    settled: bool = False
    clock: int = 0


class Oracle:
    """One shard's state, record after record.

    Attributes:
        tables: by id.
        clients: by id, forgotten ones too.
        groups: groups of workers, their parts and decisions.
        applied: numbered changes, in order; one that a group's decision applied is of kind "decision".
        change_number: of the last record.
        base_change_number: of the base from which it began; 0: of none.
    """

    def __init__(self) -> None:
        self.tables: dict[int, OracleTable] = {}
        self.clients: dict[bytes, OracleClient] = {}
        self.groups = OracleGroups()
        self.applied: list[Applied] = []
        self.change_number = 0
        self.base_change_number = 0

    def table(self, name: str) -> OracleTable:
        """Returns a table by name."""
        return next(table for table in self.tables.values() if table.spec.name == name)

    def numbers_of(self, client_id: bytes) -> list[int]:
        """Returns a client's applied numbers, in order."""
        return [applied.number for applied in self.applied if applied.client_id == client_id]

    def apply(self, record: journal_pb2.JournalRecord, data: bytes | memoryview) -> None:
        """Applies one record.

        Raises:
            AssertionError: it does not follow from what came before.
        """
        assert record.change_number == self.change_number + 1, f"{record.change_number} comes after {self.change_number}"
        self.change_number = record.change_number
        kind = record.WhichOneof("change")
        assert kind is not None, f"change {record.change_number} is of an unknown kind"
        if record.HasField("origin") and kind != "part":
            self._count(record.origin, kind)
        arrays = _Arrays(data)
        self._change(kind, record, arrays)
        assert arrays.num_left == 0, f"change {record.change_number}: {arrays.num_left} bytes too many"

    def _count(self, origin: journal_pb2.ChangeOrigin, kind: str) -> None:
        client = self._next_of(origin.client_id, origin.number)
        assert not client.ended or kind == "close", f"client {origin.client_id.hex()} had ended before number {origin.number}"
        self._check_clock(client, origin, kind)
        client.last_number = origin.number
        client.clock = origin.step or client.clock
        self.applied.append(Applied(origin.client_id, origin.number, kind, client.ended, origin.step))

    def _next_of(self, client_id: bytes, number: int) -> OracleClient:
        client = self.clients.get(client_id)
        assert client is not None, f"client {client_id.hex()} changed rows and had not opened"
        assert number == client.last_number + 1, f"number {number} comes after {client.last_number}"
        return client

    def _check_clock(self, client: OracleClient, origin: journal_pb2.ChangeOrigin, kind: str) -> None:
        """Checks that clocks of a bounded group go up by one with each push, and that nothing else moves them."""
        member = None if client.ended else self.groups.bounded_member(origin.client_id)
        expected = 0
        if member is not None and kind in ("push", "close"):
            expected = max(client.clock, member.first_step - 1) + 1
        assert origin.step == expected, f"client {origin.client_id.hex()}, number {origin.number}: clock {origin.step}"

    def _change(self, kind: str, record: journal_pb2.JournalRecord, arrays: _Arrays) -> None:
        match kind:
            case "push":
                self._push(record.push, record.change_number, arrays)
            case "close":
                self._check_late(record)
                for step in record.close.steps:
                    table = self.tables[step.table_id]
                    assert step.table_step == table.step + 1, f"table {table.spec.name}: VOID to step {step.table_step}"
                    table.step = step.table_step
            case "assign":
                self._assign(record.assign, record.change_number, arrays)
            case "delete":
                self.tables[record.delete.table_id].delete(arrays.take_ids(arrays.num_left // 8))
            case "clear_moments":
                table = self.tables[record.clear_moments.table_id]
                table.clear_moments(arrays.take_ids(arrays.num_left // 8), record.change_number)
            case "install":
                self.tables.update({info.table_id: OracleTable(info) for info in record.install.tables})
            case "steps":
                for step in record.steps.steps:
                    self.tables[step.table_id].step = max(self.tables[step.table_id].step, step.table_step)
            case "part" | "decision" | "group":
                self._change_groups(kind, record, arrays)
            case _:
                self._change_clients(kind, record)

    def _change_groups(self, kind: str, record: journal_pb2.JournalRecord, arrays: _Arrays) -> None:
        match kind:
            case "part":
                self._stage(record, arrays)
            case "decision":
                self._decide(record.decision, record.change_number, arrays)
            case "group":
                self.groups.set_group(record.group)

    def _change_clients(self, kind: str, record: journal_pb2.JournalRecord) -> None:
        match kind:
            case "open":
                client_id = record.open.client_id
                assert client_id not in self.clients, f"client {client_id.hex()} opened twice"
                self.clients[client_id] = OracleClient()
            case "end":
                client = self.clients.setdefault(record.end.client_id, OracleClient())
                client.ended, client.settled = True, client.settled or record.end.settled
                self.groups.drop_part(record.end.client_id)
            case "forget":
                pass  # its books stay: a forgotten client must not come back
            case _:
                raise AssertionError(f"change {record.change_number} is of kind {kind}, which the oracle does not know")

    def _check_late(self, record: journal_pb2.JournalRecord) -> None:
        """Checks a number that a contribution used up that came after its step was decided."""
        if not record.close.HasField("result"):
            return
        result, client_id = record.close.result, record.origin.client_id
        group = next(group for group in self.groups.groups.values() if group.member(client_id) is not None)
        assert result.step <= group.step, f"step {result.step} was closed for {client_id.hex()} before it was decided"
        assert (result.num_contributions, len(record.close.steps)) == (0, 0), f"a contribution too late stepped: {result}"

    def _stage(self, record: journal_pb2.JournalRecord, arrays: _Arrays) -> None:
        origin = record.origin
        client = self._next_of(origin.client_id, origin.number)
        assert not client.ended, f"client {origin.client_id.hex()} had ended before its part of number {origin.number}"
        self.groups.stage(self._part(origin, record.part, arrays))

    def _part(self, origin: journal_pb2.ChangeOrigin, part: journal_pb2.PartRecord, arrays: _Arrays) -> Part:
        row_ids = [arrays.take_ids(table.num_rows) for table in part.tables]
        rows = [arrays.take_rows(table.num_rows, self.tables[table.table_id].spec.dim) for table in part.tables]
        tables = {
            table.table_id: PartTable(ids, gradients, table.options)
            for table, ids, gradients in zip(part.tables, row_ids, rows, strict=True)
        }
        kind = KINDS[part.kind]
        assert kind == "gradient" or not tables, f"rank {part.rank} sent gradients and calls them {kind}"
        return Part(origin.client_id, origin.number, part.group, part.step, part.rank, kind, tables)

    def _decide(self, record: journal_pb2.DecisionRecord, change_number: int, arrays: _Arrays) -> None:
        decision, parts = self.groups.decided(record)
        for one in decision.counted:
            client = self._next_of(one.client_id, one.number)
            assert not client.ended, f"client {one.client_id.hex()} had ended before step {decision.step}"
            client.last_number = one.number
            self.applied.append(Applied(one.client_id, one.number, "decision", after_end=False))
        contributions = len(decision.counted) if decision.reduce_mean else 1
        for push in record.tables:
            table = self.tables[push.table_id]
            sections = [part.tables[push.table_id] for part in parts if push.table_id in part.tables]
            assert all(one.options == push.options for one in sections), f"step {decision.step}: ranks differ in options"
            row_ids, sums = merged_by_rank([table.without_padding(one.row_ids, one.gradients) for one in sections])
            values = unscaled(sums, read_factors(push.factors))
            assert not is_refused(values), f"step {decision.step} was applied and had to be refused"
            steps = arrays.take("<u4", push.num_row_steps).astype(np.int64)
            factors = arrays.take("<f4", push.num_row_steps).astype(np.float32)
            gradient = UnscaledGradient(row_ids, values, contributions)
            table.push_unscaled(push, gradient, RecordedRows(steps, factors), change_number)

    def _push(self, push: journal_pb2.PushRecord, change_number: int, arrays: _Arrays) -> None:
        tables = [self.tables[part.table_id] for part in push.tables]
        row_ids = [arrays.take_ids(part.num_rows) for part in push.tables]
        gradients = [arrays.take_rows(part.num_rows, table.spec.dim) for table, part in zip(tables, push.tables, strict=True)]
        assert sum(ids.nbytes for ids in row_ids) == push.row_ids_bytes
        assert sum(rows.nbytes for rows in gradients) == push.rows_bytes
        for table, part, ids, rows in zip(tables, push.tables, row_ids, gradients, strict=True):
            steps = arrays.take("<u4", part.num_row_steps).astype(np.int64)
            factors = arrays.take("<f4", part.num_row_steps).astype(np.float32)
            table.push(part, ids, rows, RecordedRows(steps, factors), change_number)

    def _assign(self, assign: journal_pb2.AssignRecord, change_number: int, arrays: _Arrays) -> None:
        table = self.tables[assign.table_id]
        present = {"weight": True, "exp_avg": assign.has_exp_avg, "exp_avg_sq": assign.has_exp_avg_sq}
        row_ids = arrays.take_ids(assign.num_rows)
        columns = {name: arrays.take_rows(assign.num_rows, table.spec.dim) for name, there in present.items() if there}
        row_steps = arrays.take("<u4", assign.num_rows).astype(np.int64) if assign.has_row_steps else None
        table.assign(row_ids, columns, change_number, if_absent=assign.if_absent, row_steps=row_steps)
        if assign.HasField("table_step"):
            assert table.step in (0, assign.table_step), f"table {table.spec.name} was set from {table.step} to another step"
            table.step = assign.table_step

    # -- a base

    def load(self, part: journal_pb2.BaseRecord, data: bytes | memoryview) -> None:
        """Takes one record of a base over; the journal's first record follows the base's change number."""
        arrays = _Arrays(data)
        match part.WhichOneof("part"):
            case "table":
                self.tables[part.table.table_id] = OracleTable(part.table)
            case "rows":
                self._load_rows(self.tables[part.rows.table_id], part.rows.num_rows, arrays)
            case "client":
                stored = part.client
                self.clients[stored.client_id] = OracleClient(stored.last_number, stored.closed, stored.settled, stored.clock)
            case "group":
                self.groups.set_group(journal_pb2.GroupRecord(group=part.group.group, step=part.group.step))
            case "staged_part":
                stored_part = part.staged_part
                self.groups.parts[stored_part.origin.client_id] = self._part(stored_part.origin, stored_part.part, arrays)

    def _load_rows(self, table: OracleTable, count: int, arrays: _Arrays) -> None:
        row_ids = arrays.take_ids(count)
        weight, exp_avg, exp_avg_sq = (arrays.take_rows(count, table.spec.dim) for _ in range(3))
        row_steps = arrays.take("<u4", count).astype(np.int64)
        touched_steps, change_numbers = arrays.take_ids(count), arrays.take("<u8", count).astype(np.int64)
        table.put(TableRows(row_ids, weight, exp_avg, exp_avg_sq, row_steps, touched_steps, change_numbers), row_steps)


class _Arrays:
    """The arrays behind a record, one after the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    @property
    def num_left(self) -> int:
        return len(self._data)

    def take(self, dtype: str, count: int) -> npt.NDArray[np.generic]:
        num_bytes = count * np.dtype(dtype).itemsize
        assert num_bytes <= len(self._data), f"a record counts {num_bytes} bytes and has {len(self._data)}"
        array = np.frombuffer(self._data[:num_bytes], dtype)
        self._data = self._data[num_bytes:]
        return array

    def take_ids(self, count: int) -> Int64s:
        return self.take("<i8", count).astype(np.int64)

    def take_rows(self, count: int, dim: int) -> Float32s:
        return self.take("<f4", count * dim).astype(np.float32).reshape(count, dim)
