"""Changes as a journal's records; replay.py is the way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import Factors
from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.entries import StagedPart
from shardam_server.shard.groups.messages import encode_decision, encode_group, encode_kind, encode_result
from shardam_server.shard.groups.values import Decision, Group, StepResult
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.option_messages import encode_options
from shardam_server.shard.records import Int64s
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.table import GradientSection, StagedTableStep, Table

Change = tuple[journal_pb2.JournalRecord, Arrays]
"""A record and the arrays behind it."""


def bare_record(change_number: int) -> Change:
    """Describes a change that no journal keeps."""
    return journal_pb2.JournalRecord(change_number=change_number), []


def push_record(
    change_number: int, origin: Origin | None, sections: Sequence[GradientSection], staged: Sequence[StagedTableStep]
) -> Change:
    """Describes a push whose steps are staged."""
    tables = [_table_push(section, step, section.row_ids.size) for section, step in zip(sections, staged, strict=True)]
    row_ids = [section.row_ids for section in sections]
    gradients = [section.gradients for section in sections]
    push = journal_pb2.PushRecord(
        tables=tables, row_ids_bytes=sum(ids.nbytes for ids in row_ids), rows_bytes=sum(rows.nbytes for rows in gradients)
    )
    return _record(change_number, origin, push=push), [*row_ids, *gradients, *_row_steps(staged)]


def part_record(change_number: int, part: StagedPart, sections: Sequence[GradientSection]) -> Change:
    """Describes a part that waits for its step's decision; its sections as pushed."""
    row_ids = [section.row_ids for section in sections]
    gradients = [section.gradients for section in sections]
    return _record(change_number, part.origin, part=encode_part(part, row_ids)), [*row_ids, *gradients]


def encode_part(part: StagedPart, row_ids: Sequence[Int64s]) -> journal_pb2.PartRecord:
    """Converts a part; row_ids: each table's ids, in the order of its tables, as the arrays behind the message have them."""
    tables = [
        journal_pb2.TablePart(
            table_id=table_id, num_rows=ids.size, options=encode_options(gradient.options, gradient.grad_scale)
        )
        for (table_id, gradient), ids in zip(part.tables.items(), row_ids, strict=True)
    ]
    return journal_pb2.PartRecord(group=part.group, step=part.step, rank=part.rank, kind=encode_kind(part.kind), tables=tables)


def decision_record(
    change_number: int, decision: Decision, sections: Sequence[GradientSection], staged: Sequence[StagedTableStep]
) -> Change:
    """Describes a decided step; its sections are the merged gradients, which follow from the parts."""
    tables = [_table_push(section, step, step.update.slots.size) for section, step in zip(sections, staged, strict=True)]
    record = journal_pb2.DecisionRecord(decision=encode_decision(decision), tables=tables)
    return _record(change_number, None, decision=record), _row_steps(staged)


def group_record(change_number: int, group: Group, step: int) -> Change:
    """Describes a group's members; step: its last decided one, for a shard that did not know it."""
    return _record(change_number, None, group=journal_pb2.GroupRecord(group=encode_group(group), step=step)), []


def close_record(change_number: int, origin: Origin, steps: Mapping[int, int], result: StepResult | None = None) -> Change:
    """Describes a number closed without a gradient; steps: table id -> its step after it."""
    close = journal_pb2.CloseRecord(steps=_steps(steps), result=encode_result(result))
    return _record(change_number, origin, close=close), []


def assign_record(change_number: int, origin: Origin | None, table: Table, write: RowWrite) -> Change:
    """Describes rows written."""
    arrays = [array for array in (write.exp_avg, write.exp_avg_sq, write.row_steps) if array is not None]
    assign = journal_pb2.AssignRecord(
        table_id=table.table_id,
        if_absent=write.if_absent,
        num_rows=write.row_ids.size,
        has_exp_avg=write.exp_avg is not None,
        has_exp_avg_sq=write.exp_avg_sq is not None,
        has_row_steps=write.row_steps is not None,
        table_step=write.table_step,
    )
    return _record(change_number, origin, assign=assign), [write.row_ids, write.weight, *arrays]


def delete_record(change_number: int, origin: Origin | None, table: Table, row_ids: Int64s) -> Change:
    """Describes rows deleted."""
    return _record(change_number, origin, delete=journal_pb2.RowsRecord(table_id=table.table_id)), [row_ids]


def clear_moments_record(change_number: int, origin: Origin | None, table: Table, row_ids: Int64s) -> Change:
    """Describes rows whose moments are cleared."""
    return _record(change_number, origin, clear_moments=journal_pb2.RowsRecord(table_id=table.table_id)), [row_ids]


def install_record(change_number: int, tables: Iterable[common_pb2.TableInfo]) -> Change:
    """Describes tables installed."""
    return _record(change_number, None, install=journal_pb2.InstallRecord(tables=tables)), []


def steps_record(change_number: int, steps: Mapping[int, int]) -> Change:
    """Describes steps taken over from other shards."""
    return _record(change_number, None, steps=journal_pb2.StepsRecord(steps=_steps(steps))), []


def open_record(change_number: int, client_id: bytes, *, heartbeats: bool, forgotten: bytes | None) -> Change:
    """Describes a client that opens."""
    message = journal_pb2.OpenRecord(client_id=client_id, heartbeats=heartbeats, forgotten_client_id=forgotten or b"")
    return _record(change_number, None, open=message), []


def end_record(change_number: int, client_id: bytes, *, settled: bool) -> Change:
    """Describes a client that takes no more changes."""
    return _record(change_number, None, end=journal_pb2.EndRecord(client_id=client_id, settled=settled)), []


def forget_record(change_number: int, client_ids: Iterable[bytes]) -> Change:
    """Describes clients forgotten."""
    return _record(change_number, None, forget=journal_pb2.ForgetRecord(client_ids=client_ids)), []


def _record(
    change_number: int,
    origin: Origin | None,
    *,
    push: journal_pb2.PushRecord | None = None,
    close: journal_pb2.CloseRecord | None = None,
    assign: journal_pb2.AssignRecord | None = None,
    delete: journal_pb2.RowsRecord | None = None,
    clear_moments: journal_pb2.RowsRecord | None = None,
    install: journal_pb2.InstallRecord | None = None,
    steps: journal_pb2.StepsRecord | None = None,
    open: journal_pb2.OpenRecord | None = None,  # noqa: A002 - the field's name
    end: journal_pb2.EndRecord | None = None,
    forget: journal_pb2.ForgetRecord | None = None,
    part: journal_pb2.PartRecord | None = None,
    decision: journal_pb2.DecisionRecord | None = None,
    group: journal_pb2.GroupRecord | None = None,
) -> journal_pb2.JournalRecord:
    return journal_pb2.JournalRecord(
        change_number=change_number,
        origin=None if origin is None else encode_origin(origin),
        push=push,
        close=close,
        assign=assign,
        delete=delete,
        clear_moments=clear_moments,
        install=install,
        steps=steps,
        open=open,
        end=end,
        forget=forget,
        part=part,
        decision=decision,
        group=group,
    )


def encode_origin(origin: Origin) -> journal_pb2.ChangeOrigin:
    """Converts the client and number that a change came as."""
    return journal_pb2.ChangeOrigin(client_id=origin.client_id, number=origin.number, digest=origin.digest, step=origin.clock)


def _row_steps(staged: Sequence[StagedTableStep]) -> list[npt.NDArray[np.generic]]:
    """Returns row steps and factors of the tables that have them."""
    values = [step.update.values for step in staged if step.update.values is not None]
    return [array for one in values for array in (one.steps, one.factors)]


def _table_push(section: GradientSection, staged: StagedTableStep, num_rows: int) -> journal_pb2.TablePush:
    values = staged.update.values
    return journal_pb2.TablePush(
        table_id=section.table.table_id,
        table_step=staged.step.table_step,
        num_rows=num_rows,
        factors=_factors(staged.step.factors),
        options=encode_options(section.options, section.grad_scale),
        num_row_steps=0 if values is None else values.steps.size,
    )


def _steps(steps: Mapping[int, int]) -> list[common_pb2.TableStep]:
    return [common_pb2.TableStep(table_id=table_id, table_step=step) for table_id, step in steps.items()]


def _factors(factors: Factors) -> journal_pb2.StepFactors:
    return journal_pb2.StepFactors(
        c1=factors.c1,
        c2=factors.c2,
        s=factors.s,
        d=factors.d,
        eps=factors.eps,
        weight_decay=factors.weight_decay,
        unscale=factors.unscale,
        divisor=factors.divisor,
        maximize=factors.maximize,
        decoupled=factors.decoupled,
    )
