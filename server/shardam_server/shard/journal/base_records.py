"""Parts of a shard's state as the records of a base file; base_file.py is the way back."""

from __future__ import annotations

import numpy as np

from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.groups.entries import GroupEntry, StagedPart
from shardam_server.shard.groups.messages import encode_decision, encode_group, encode_result
from shardam_server.shard.journal.change_records import encode_origin, encode_part
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.option_messages import encode_options
from shardam_server.shard.storage import RowCopies
from shardam_server.shard.table import Table

BaseRecord = tuple[journal_pb2.BaseRecord, Arrays]
"""A record and the arrays behind it."""


def table_message(table: Table) -> common_pb2.TableInfo:
    """Describes a table with everything that is not in its rows."""
    info = table.schema_info(with_step=True)
    info.num_rows = table.num_rows
    info.saturated_values = table.storage.saturated_values
    info.nonfinite_pushes = table.nonfinite_pushes
    if table.last_options is not None:
        info.last_options.CopyFrom(encode_options(table.last_options))
    return info


def rows_record(table_id: int, rows: RowCopies) -> BaseRecord:
    """Describes rows of a table."""
    stored = journal_pb2.StoredRows(table_id=table_id, num_rows=rows.row_ids.size)
    return journal_pb2.BaseRecord(rows=stored), [
        rows.row_ids,
        rows.weight,
        rows.exp_avg,
        rows.exp_avg_sq,
        rows.counters.row_step.astype(np.uint32),
        rows.counters.touched_step,
        rows.counters.change_number,
    ]


def client_record(client_id: bytes, entry: ClientEntry) -> BaseRecord:
    """Describes a client."""
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
    client = journal_pb2.StoredClient(
        client_id=client_id,
        last_number=entry.last_number,
        closed=entry.closed,
        settled=entry.settled,
        heartbeats=entry.heartbeats,
        outcomes=outcomes,
        clock=entry.clock,
    )
    return journal_pb2.BaseRecord(client=client), []


def group_message(entry: GroupEntry) -> journal_pb2.StoredGroup:
    """Describes a group as it is now."""
    decision = None if entry.decision is None else encode_decision(entry.decision)
    return journal_pb2.StoredGroup(group=encode_group(entry.group), step=entry.step, decision=decision)


def part_record(part: StagedPart) -> BaseRecord:
    """Describes a staged part."""
    row_ids = [gradient.row_ids for gradient in part.tables.values()]
    rows = [gradient.gradients for gradient in part.tables.values()]
    stored = journal_pb2.StoredPart(origin=encode_origin(part.origin), part=encode_part(part, row_ids))
    return journal_pb2.BaseRecord(staged_part=stored), [*row_ids, *rows]


def end_record(num_rows: int, num_clients: int) -> BaseRecord:
    """Describes the end of a base."""
    return journal_pb2.BaseRecord(end=journal_pb2.BaseEnd(num_rows=num_rows, num_clients=num_clients)), []
