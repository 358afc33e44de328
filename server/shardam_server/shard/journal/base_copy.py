"""A shard's whole state between two changes, copied to memory, as the records of a base file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.groups.entries import GroupEntry, StagedPart
from shardam_server.shard.groups.messages import encode_decision, encode_group, encode_result
from shardam_server.shard.journal.change_records import encode_origin, encode_part
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.option_messages import encode_options
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table, read_locks

CHUNK_BYTES = 4 * 2**20
"""Bytes of rows in one record of a base: what reading one back holds in memory, and large beside a record's own cost."""

COUNTER_BYTES = 8 + 4 + 8 + 8
"""Bytes of a row beside its floats: id, row step, last touched step, change number."""


def row_bytes(dim: int) -> int:
    """Returns the bytes of one row in a base; its weight is float32 there whatever the table's dtype."""
    return COUNTER_BYTES + 3 * 4 * dim


@dataclasses.dataclass(frozen=True)
class TableCopy:
    """One table.

    Attributes:
        info: schema, id, seed, step and counters.
        chunks: its rows, each chunk as the arrays of StoredRows.
    """

    info: common_pb2.TableInfo
    chunks: list[list[npt.NDArray[np.generic]]]


@dataclasses.dataclass(frozen=True)
class StateCopy:
    """All of a state.

    Attributes:
        change_number: the change that it is as of.
        tables: its tables.
        clients: its clients, the oldest first.
        groups: its groups.
        parts: parts that wait for a decision; their arrays are never written to.
    """

    change_number: int
    tables: list[TableCopy]
    clients: list[tuple[bytes, ClientEntry]]
    groups: list[journal_pb2.StoredGroup]
    parts: list[StagedPart]

    @property
    def num_rows(self) -> int:
        """Rows over all tables."""
        return sum(chunk[0].size for table in self.tables for chunk in table.chunks)

    def records(self) -> Iterator[tuple[journal_pb2.BaseRecord, Arrays]]:
        """Yields the records of a base file, each with its arrays."""
        for table in self.tables:
            yield journal_pb2.BaseRecord(table=table.info), []
            for chunk in table.chunks:
                rows = journal_pb2.StoredRows(table_id=table.info.table_id, num_rows=chunk[0].size)
                yield journal_pb2.BaseRecord(rows=rows), chunk
        for client_id, entry in self.clients:
            yield journal_pb2.BaseRecord(client=_client_message(client_id, entry)), []
        for group in self.groups:
            yield journal_pb2.BaseRecord(group=group), []
        for part in self.parts:
            yield _part_record(part)
        yield journal_pb2.BaseRecord(end=journal_pb2.BaseEnd(num_rows=self.num_rows, num_clients=len(self.clients))), []


def copy_state(state: ShardState) -> StateCopy:
    """Copies a state; on the sequencer's thread, so that no change comes in between."""
    return StateCopy(
        state.change_number,
        [_copy_table(table) for table in state.tables()],
        # What a number's outcome is never changes; which numbers are kept does.
        [(client_id, dataclasses.replace(entry, outcomes=dict(entry.outcomes))) for client_id, entry in state.clients],
        [_group_message(entry) for entry in state.groups],
        state.groups.parts(),
    )


def estimate_bytes(state: ShardState) -> int:
    """Returns about how large a base of a state would be; from any thread."""
    rows = sum(table.num_rows * row_bytes(table.spec.dim) for table in state.tables())
    return rows + sum(part.num_bytes for part in state.groups.parts())


def _copy_table(table: Table) -> TableCopy:
    info = table.schema_info(with_step=True)
    info.num_rows = table.num_rows
    info.saturated_values = table.storage.saturated_values
    info.nonfinite_pushes = table.nonfinite_pushes
    if table.last_options is not None:
        info.last_options.CopyFrom(encode_options(table.last_options))
    with read_locks([table]):
        return TableCopy(info, list(_copy_rows(table)))


def _copy_rows(table: Table) -> Iterator[list[npt.NDArray[np.generic]]]:
    max_rows = max(1, CHUNK_BYTES // row_bytes(table.spec.dim))
    storage, key = table.storage, 0
    from_key: int | None = key
    while from_key is not None:
        row_ids, from_key = storage.scan(from_key, max_rows)
        if row_ids.size == 0:
            continue
        slots = storage.lookup(row_ids)
        counters = storage.counters(slots)
        yield [
            row_ids,
            storage.gather(slots, row_ids),
            storage.read("exp_avg", slots),
            storage.read("exp_avg_sq", slots),
            counters.row_step.astype(np.uint32),
            counters.touched_step,
            counters.change_number,
        ]


def _client_message(client_id: bytes, entry: ClientEntry) -> journal_pb2.StoredClient:
    outcomes = [
        journal_pb2.StoredOutcome(
            number=number,
            digest=digest,
            steps=[common_pb2.TableStep(table_id=table_id, table_step=step) for table_id, step in outcome.steps.items()],
            num_rows=outcome.num_rows,
            change_number=outcome.change_number,
            result=encode_result(outcome.result),
        )
        for number, (digest, outcome) in entry.outcomes.items()
    ]
    return journal_pb2.StoredClient(
        client_id=client_id,
        last_number=entry.last_number,
        closed=entry.closed,
        settled=entry.settled,
        heartbeats=entry.heartbeats,
        outcomes=outcomes,
        clock=entry.clock,
    )


def _group_message(entry: GroupEntry) -> journal_pb2.StoredGroup:
    decision = None if entry.decision is None else encode_decision(entry.decision)
    return journal_pb2.StoredGroup(group=encode_group(entry.group), step=entry.step, decision=decision)


def _part_record(part: StagedPart) -> tuple[journal_pb2.BaseRecord, Arrays]:
    row_ids = [gradient.row_ids for gradient in part.tables.values()]
    rows = [gradient.gradients for gradient in part.tables.values()]
    stored = journal_pb2.StoredPart(origin=encode_origin(part.origin), part=encode_part(part, row_ids))
    return journal_pb2.BaseRecord(staged_part=stored), [*row_ids, *rows]
