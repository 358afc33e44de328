"""A journal's records as changes of a shard's state; change_records.py is the way there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import Factors
from shardam_proto.errors import JournalDamaged, JournalFailed, OutOfMemory, ShardamError
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, close_late, decide, set_group, stage
from shardam_server.shard.groups.messages import decode_decision, decode_group, decode_kind, decode_result
from shardam_server.shard.option_messages import decode_options
from shardam_server.shard.records import Int64s
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords
from shardam_server.shard.table import GradientSection, RecordedStep, Table, table_from_info
from shardam_server.shard.table_steps import RowStepValues

Change = Callable[[], object]
"""Applies a record that has been checked."""


class ArrayReader:
    """Reads the arrays behind a record one after the other.

    Args:
        data: their bytes.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._start = 0

    def take(self, dtype: str, count: int) -> npt.NDArray[np.generic]:
        """Returns the next array.

        Raises:
            JournalDamaged: fewer bytes are left.
        """
        end = self._start + count * np.dtype(dtype).itemsize
        if end > len(self._data):
            raise JournalDamaged(f"a record has {len(self._data)} bytes of arrays, its message counts {end} or more")
        array = np.frombuffer(self._data[self._start : end], dtype)
        self._start = end
        return array

    def take_rows(self, num_rows: int, dim: int) -> npt.NDArray[np.float32]:
        """Returns the next rows, float32 [num_rows, dim]."""
        return self.take("<f4", num_rows * dim).astype(np.float32, copy=False).reshape(num_rows, dim)

    def take_ids(self, count: int) -> Int64s:
        """Returns the next ids, int64 [count]."""
        return self.take("<i8", count).astype(np.int64, copy=False)

    def rest(self, itemsize: int) -> int:
        """Returns how many items of a size are left."""
        return (len(self._data) - self._start) // itemsize

    def finish(self) -> None:
        """Checks that all has been read.

        Raises:
            JournalDamaged: bytes are left.
        """
        if self._start != len(self._data):
            raise JournalDamaged(f"a record has {len(self._data)} bytes of arrays, its message counts {self._start}")


class Replay:
    """Applies records to a state, in order, exactly as they were applied before.

    Args:
        state: the state; it has no journal while it is replayed.
        make_records: makes an empty record store for a new table.
    """

    def __init__(self, state: ShardState, make_records: MakeRecords) -> None:
        self._state = state
        self._make_records = make_records
        self._ways: dict[str, Callable[[journal_pb2.JournalRecord, ArrayReader, Origin | None], Change]] = {
            "push": self._push,
            "close": self._close,
            "assign": self._assign,
            "delete": self._delete,
            "clear_moments": self._clear_moments,
            "install": self._install,
            "steps": self._steps,
            "open": self._open,
            "end": self._end,
            "forget": self._forget,
            "part": self._part,
            "decision": self._decision,
            "group": self._group,
        }

    def apply(self, record: journal_pb2.JournalRecord, data: bytes | bytearray | memoryview) -> None:
        """Applies one record.

        Raises:
            JournalDamaged: it does not follow from the state before it, which is as it was.
            JournalFailed: it broke off while it was applied; the state is of no use, and another start may do better.
            OutOfMemory: this machine has less room than the one that wrote it.
        """
        state, kind = self._state, record.WhichOneof("change")
        if record.change_number != state.change_number + 1:
            raise JournalDamaged(f"change {record.change_number} comes after change {state.change_number}")
        if kind is None:
            raise JournalDamaged(f"change {record.change_number} is of a kind that this version does not know")
        origin, arrays = _origin(record), ArrayReader(data)
        self._check_number(record, origin)
        try:
            change = self._ways[kind](record, arrays, origin)
            arrays.finish()
            change()
        except (JournalDamaged, JournalFailed, OutOfMemory):
            raise
        except ShardamError as error:
            raise JournalDamaged(
                f"change {record.change_number} ({kind}) was applied before and is refused now: {error.message}"
            ) from error
        if state.change_number != record.change_number:
            raise JournalDamaged(f"change {record.change_number} ({kind}) had no effect when it was applied again")

    def _check_number(self, record: journal_pb2.JournalRecord, origin: Origin | None) -> None:
        entry = None if origin is None else self._state.clients.find(origin.client_id)
        if origin is not None and entry is not None and origin.number != entry.last_number + 1:
            raise JournalDamaged(
                f"change {record.change_number} is number {origin.number} of client {origin.client_id.hex()}, whose last "
                f"number is {entry.last_number}"
            )

    def _push(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        pushes = record.push.tables
        tables = [self._state.table(push.table_id) for push in pushes]
        row_ids = [arrays.take_ids(push.num_rows) for push in pushes]
        rows = [arrays.take_rows(push.num_rows, table.spec.dim) for table, push in zip(tables, pushes, strict=True)]
        sections = []
        for table, push, ids, gradients in zip(tables, pushes, row_ids, rows, strict=True):
            recorded = _recorded_step(table, push, arrays)
            options = decode_options(push.options)
            sections.append(GradientSection(table, ids, gradients, options, push.options.grad_scale, recorded=recorded))
        return lambda: self._state.push(sections, origin)

    def _close(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        if origin is None:
            raise JournalDamaged(f"change {record.change_number} closes the number of no client")
        if record.close.HasField("result"):
            result = decode_result(record.close.result)
            return lambda: close_late(self._state, origin, result)
        steps = {step.table_id: step.table_step for step in record.close.steps}
        next_steps = {table_id: self._state.table(table_id).step + 1 for table_id in steps}
        if steps != next_steps:
            raise JournalDamaged(
                f"change {record.change_number} took tables to {steps}, replayed it takes them to {next_steps}"
            )
        return lambda: self._state.void(list(steps), origin)

    def _part(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        if origin is None:
            raise JournalDamaged(f"change {record.change_number} is the part of no client")
        part = IncomingPart(
            origin,
            record.part.step,
            record.part.rank,
            decode_kind(record.part.kind),
            read_sections(self._state, record.part, arrays),
        )
        return lambda: stage(self._state, part)

    def _decision(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        decision, recorded = decode_decision(record.decision.decision), {}
        for push in record.decision.tables:
            recorded[push.table_id] = _recorded_step(self._state.table(push.table_id), push, arrays)
        return lambda: decide(self._state, decision, recorded)

    def _group(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        group = decode_group(record.group.group)
        return lambda: set_group(self._state, group, record.group.step)

    def _assign(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        message = record.assign
        table = self._state.table(message.table_id)
        num_rows, dim = message.num_rows, table.spec.dim
        write = RowWrite(
            arrays.take_ids(num_rows),
            arrays.take_rows(num_rows, dim),
            arrays.take_rows(num_rows, dim) if message.has_exp_avg else None,
            arrays.take_rows(num_rows, dim) if message.has_exp_avg_sq else None,
            message.if_absent,
            arrays.take("<u4", num_rows).astype(np.uint32, copy=False) if message.has_row_steps else None,
            message.table_step if message.HasField("table_step") else None,
        )
        return lambda: self._state.assign(table, write, origin=origin)

    def _delete(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        table = self._state.table(record.delete.table_id)
        row_ids = arrays.take_ids(arrays.rest(8))
        return lambda: self._state.delete(table, row_ids, origin=origin)

    def _clear_moments(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        table = self._state.table(record.clear_moments.table_id)
        row_ids = arrays.take_ids(arrays.rest(8))
        return lambda: self._state.clear_moments(table, row_ids, origin=origin)

    def _install(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        tables = [table_from_info(info, self._make_records) for info in record.install.tables]
        return lambda: self._state.install(tables)

    def _steps(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        steps = {step.table_id: step.table_step for step in record.steps.steps}
        return lambda: self._state.raise_steps(steps)

    def _open(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        message = record.open

        def change() -> None:
            if message.forgotten_client_id:
                self._state.clients.forget([message.forgotten_client_id])
            self._state.clients.add(message.client_id, heartbeats=message.heartbeats)
            self._state.change_number += 1

        return change

    def _end(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        message = record.end
        return lambda: self._state.end_client(message.client_id, settled=message.settled, remember=True)

    def _forget(self, record: journal_pb2.JournalRecord, arrays: ArrayReader, origin: Origin | None) -> Change:
        client_ids = list(record.forget.client_ids)

        def change() -> None:
            self._state.clients.forget(client_ids)
            self._state.change_number += 1

        return change


def read_factors(message: journal_pb2.StepFactors) -> Factors:
    """Converts a step's factors; a protobuf float is exactly a float32."""
    return Factors(
        c1=message.c1,
        c2=message.c2,
        s=message.s,
        d=message.d,
        eps=message.eps,
        weight_decay=message.weight_decay,
        unscale=message.unscale,
        divisor=message.divisor,
        maximize=message.maximize,
        decoupled=message.decoupled,
    )


def read_sections(state: ShardState, message: journal_pb2.PartRecord, arrays: ArrayReader) -> list[GradientSection]:
    """Reads the gradients of a part.

    Raises:
        JournalDamaged: there are fewer bytes than it counts.
        UnknownTable: a table is not known.
    """
    tables = [state.table(part.table_id) for part in message.tables]
    row_ids = [arrays.take_ids(part.num_rows) for part in message.tables]
    rows = [arrays.take_rows(part.num_rows, table.spec.dim) for table, part in zip(tables, message.tables, strict=True)]
    return [
        GradientSection(table, ids, gradients, decode_options(part.options), part.options.grad_scale)
        for table, part, ids, gradients in zip(tables, message.tables, row_ids, rows, strict=True)
    ]


def _recorded_step(table: Table, push: journal_pb2.TablePush, arrays: ArrayReader) -> RecordedStep:
    values = None
    if table.spec.step == "row":
        steps = arrays.take("<u4", push.num_row_steps).astype(np.uint32, copy=False)
        values = RowStepValues(steps, arrays.take("<f4", push.num_row_steps).astype(np.float32, copy=False))
    return RecordedStep(push.table_step, read_factors(push.factors), values)


def decode_origin(message: journal_pb2.ChangeOrigin) -> Origin:
    """Converts the client and number that a change came as."""
    return Origin(message.client_id, message.number, message.digest, message.step)


def _origin(record: journal_pb2.JournalRecord) -> Origin | None:
    return decode_origin(record.origin) if record.HasField("origin") else None
