"""A shard's state from its journal, through the NumPy kernels and the recorded factors alone: what its live rows must equal.

It also keeps the books of PROTOCOL.md, section 4: which client's which number was applied, each once and in order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_proto.v1 import journal_pb2
from shardam_testing.faults.oracle_table import Float32s, Int64s, OracleTable, RecordedRows, TableRows


@dataclasses.dataclass(frozen=True)
class Applied:
    """A numbered change.

    Attributes:
        client_id: whose.
        number: its number.
        kind: the record's field: "push", "close", "assign", ...
        after_end: it was closed by home for a client that had ended.
    """

    client_id: bytes
    number: int
    kind: str
    after_end: bool


@dataclasses.dataclass
class OracleClient:
    """A client's books on one shard."""

    last_number: int = 0
    ended: bool = False
    settled: bool = False


class Oracle:
    """One shard's state, record after record.

    Attributes:
        tables: by id.
        clients: by id, forgotten ones too.
        applied: numbered changes, in order.
        change_number: of the last record.
        base_change_number: of the base from which it began; 0: of none.
    """

    def __init__(self) -> None:
        self.tables: dict[int, OracleTable] = {}
        self.clients: dict[bytes, OracleClient] = {}
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
        if record.HasField("origin"):
            self._count(record.origin, kind)
        arrays = _Arrays(data)
        self._change(kind, record, arrays)
        assert arrays.num_left == 0, f"change {record.change_number}: {arrays.num_left} bytes too many"

    def _count(self, origin: journal_pb2.ChangeOrigin, kind: str) -> None:
        client = self.clients.get(origin.client_id)
        assert client is not None, f"client {origin.client_id.hex()} changed rows and had not opened"
        assert origin.number == client.last_number + 1, f"number {origin.number} comes after {client.last_number}"
        assert not client.ended or kind == "close", f"client {origin.client_id.hex()} had ended before number {origin.number}"
        client.last_number = origin.number
        self.applied.append(Applied(origin.client_id, origin.number, kind, client.ended))

    def _change(self, kind: str, record: journal_pb2.JournalRecord, arrays: _Arrays) -> None:
        match kind:
            case "push":
                self._push(record.push, record.change_number, arrays)
            case "close":
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
            case _:
                self._change_clients(kind, record)

    def _change_clients(self, kind: str, record: journal_pb2.JournalRecord) -> None:
        match kind:
            case "open":
                client_id = record.open.client_id
                assert client_id not in self.clients, f"client {client_id.hex()} opened twice"
                self.clients[client_id] = OracleClient()
            case "end":
                client = self.clients.setdefault(record.end.client_id, OracleClient())
                client.ended, client.settled = True, client.settled or record.end.settled
            case "forget":
                pass  # its books stay: a forgotten client must not come back
            case _:
                raise AssertionError(f"change {record.change_number} is of kind {kind}, which the oracle does not know")

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
        table.assign(row_ids, columns, change_number, if_absent=assign.if_absent)

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
                self.clients[stored.client_id] = OracleClient(stored.last_number, stored.closed, stored.settled)

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
