"""A base as a file: written from a snapshot of a state, read back into an empty one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from shardam_proto.errors import JournalDamaged, OutOfMemory, ShardamError
from shardam_proto.v1 import journal_pb2
from shardam_server.shard.clients import ClientEntry, Outcome
from shardam_server.shard.groups.entries import GroupEntry, StagedPart
from shardam_server.shard.groups.messages import decode_decision, decode_group, decode_kind, decode_result
from shardam_server.shard.groups.parts import merge_section
from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.file_names import file_header, number_of
from shardam_server.shard.journal.frames import (
    BASE_MAGIC,
    FileDamaged,
    Frame,
    FrameReader,
    IncompleteFrame,
    encode_frame,
    encode_preamble,
)
from shardam_server.shard.journal.journal_file import JournalFile
from shardam_server.shard.journal.reader import check_header, read_header
from shardam_server.shard.journal.replay import ArrayReader, decode_origin, read_sections
from shardam_server.shard.option_messages import decode_options
from shardam_server.shard.row_counters import RowCounters
from shardam_server.shard.snapshots import Snapshot
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords
from shardam_server.shard.table import Table, table_from_info


def write_base(file: JournalFile, current: Current, snapshot: Snapshot) -> None:
    """Writes a base; it is on the disk when the call returns. Changes go on meanwhile.

    Raises:
        OSError, CutBackFailed, ShardamError: it is not; the file is of no use.
    """
    header = file_header(current, number_of(file.path), snapshot.change_number).SerializeToString()
    file.write([encode_preamble(BASE_MAGIC), *encode_frame(0, header)])
    for sequence, (record, arrays) in enumerate(snapshot.records(parts=True), start=1):
        file.write(encode_frame(sequence, record.SerializeToString(), arrays))
    file.sync()


class BaseReader:
    """Puts a base into a state.

    Args:
        state: the state; it is empty.
        make_records: makes an empty record store for a table.
    """

    def __init__(self, state: ShardState, make_records: MakeRecords) -> None:
        self._state = state
        self._make_records = make_records
        self._tables: dict[int, tuple[Table, int]] = {}
        self._num_rows = 0
        self._end: journal_pb2.BaseEnd | None = None

    def read(self, path: Path, current: Current) -> None:
        """Reads a base file.

        Raises:
            FileDamaged: it is not as it was written, or not of this state.
            VersionMismatch: another version of shardam wrote it.
            OutOfMemory: this machine has less room than the one that wrote it.
        """
        with FrameReader(path, BASE_MAGIC) as frames:
            frames.read_preamble()
            first = frames.next(0)
            if first is None:
                raise IncompleteFrame(path, frames.offset, "the file ends before its first record")
            header = read_header(path, first.message)
            check_header(path, first.message, file_header(current, number_of(path), header.change_number))
            sequence = 1
            while (frame := frames.next(sequence)) is not None:
                self._read_frame(path, frame)
                sequence += 1
            self._finish(path, frames.offset)
        self._state.change_number = self._state.loaded_change = header.change_number

    def _read_frame(self, path: Path, frame: Frame) -> None:
        if self._end is not None:
            raise FileDamaged(path, frame.offset, "a record follows the base's end")
        try:
            record = journal_pb2.BaseRecord.FromString(frame.message)
            self._read_record(record, ArrayReader(frame.arrays))
        except DecodeError as error:
            raise FileDamaged(path, frame.offset, f"a record's message cannot be decoded ({error})") from error
        except OutOfMemory:
            raise
        except ShardamError as error:
            raise FileDamaged(path, frame.offset, error.message) from error

    def _read_record(self, record: journal_pb2.BaseRecord, arrays: ArrayReader) -> None:
        match record.WhichOneof("part"):
            case "table":
                table = table_from_info(record.table, self._make_records)
                table.nonfinite_pushes = record.table.nonfinite_pushes
                if record.table.HasField("last_options"):
                    table.last_options = decode_options(record.table.last_options)
                # Rows come in the index's order, which fills a smaller index's beginning first and makes that slow.
                table.storage.reserve(record.table.num_rows)
                self._tables[table.table_id] = table, record.table.saturated_values
                self._state.put_tables([table])
            case "rows":
                self._read_rows(record.rows, arrays)
            case "client":
                self._state.clients.put(record.client.client_id, client_entry(record.client))
            case "group":
                self._state.groups.put(group_entry(record.group))
            case "staged_part":
                self._state.groups.put_part(self._staged_part(record.staged_part, arrays))
            case "end":
                self._end = record.end
            case _:
                raise JournalDamaged("a record is of a kind that this version does not know")
        arrays.finish()

    def _read_rows(self, message: journal_pb2.StoredRows, arrays: ArrayReader) -> None:
        if message.table_id not in self._tables:
            raise JournalDamaged(f"rows of table {message.table_id} come before the table")
        table, _ = self._tables[message.table_id]
        num_rows, dim = message.num_rows, table.spec.dim
        row_ids = arrays.take_ids(num_rows)
        components = {name: arrays.take_rows(num_rows, dim) for name in ("weight", "exp_avg", "exp_avg_sq")}
        row_steps = arrays.take("<u4", num_rows).astype(np.int64)
        touched_steps = arrays.take_ids(num_rows)
        change_numbers = arrays.take("<u8", num_rows).astype(np.uint64, copy=False)
        table.storage.restore(row_ids, components, RowCounters(row_steps, touched_steps, change_numbers))
        self._num_rows += num_rows

    def _staged_part(self, stored: journal_pb2.StoredPart, arrays: ArrayReader) -> StagedPart:
        part, sections = stored.part, read_sections(self._state, stored.part, arrays)
        return StagedPart(
            decode_origin(stored.origin),
            part.group,
            part.step,
            part.rank,
            decode_kind(part.kind),
            {section.table.table_id: merge_section(section) for section in sections},
        )

    def _finish(self, path: Path, offset: int) -> None:
        if self._end is None:
            raise FileDamaged(path, offset, "the file ends before the base does")
        counted = journal_pb2.BaseEnd(num_rows=self._num_rows, num_clients=len(self._state.clients))
        if counted != self._end or self._num_rows != self._state.num_rows:
            raise FileDamaged(
                path,
                offset,
                f"it should have {self._end.num_rows} rows and {self._end.num_clients} clients, it has {self._state.num_rows} "
                f"and {counted.num_clients}",
            )
        for table, saturated_values in self._tables.values():
            table.storage.finish_restore(saturated_values)


def client_entry(message: journal_pb2.StoredClient) -> ClientEntry:
    """Converts a client as it is kept."""
    outcomes = {
        stored.number: (
            stored.digest,
            Outcome(
                {step.table_id: step.table_step for step in stored.steps},
                stored.num_rows,
                stored.change_number,
                decode_result(stored.result) if stored.HasField("result") else None,
            ),
        )
        for stored in message.outcomes
    }
    return ClientEntry(
        last_number=message.last_number,
        closed=message.closed,
        settled=message.settled,
        heartbeats=message.heartbeats,
        outcomes=outcomes,
        clock=message.clock,
    )


def group_entry(message: journal_pb2.StoredGroup) -> GroupEntry:
    """Converts a group as it is kept."""
    decision = decode_decision(message.decision) if message.HasField("decision") else None
    return GroupEntry(decode_group(message.group), message.step, decision)
