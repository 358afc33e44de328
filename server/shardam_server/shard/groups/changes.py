"""Changes of a shard's state that groups make: members, parts that are staged, steps that are decided.

On the sequencer's thread; each is whole in the journal before it is applied, as every change is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from shardam_proto.errors import GroupMismatch, RowLimit, SequenceError, ShardamError, ShardNotReady
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.groups.entries import GroupEntry, MergedGradient, StagedPart
from shardam_server.shard.groups.parts import counted_parts, merge_section, merged_sections
from shardam_server.shard.groups.values import Decision, Group, Kind, Refusal, StepResult
from shardam_server.shard.journal import change_records
from shardam_server.shard.row_limits import check_room
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, RecordedStep, StagedTableStep, Table

DECIDED = b"decided"
"""Digest of a number that a decision closed on a shard that had no part of it."""


@dataclasses.dataclass(frozen=True)
class IncomingPart:
    """A part as it was pushed.

    Attributes:
        origin: client, number and digest.
        step: the step that it contributes to.
        rank: the member's.
        kind: what it contributes.
        sections: the tables, each once; empty unless kind is gradient.
    """

    origin: Origin
    step: int
    rank: int
    kind: Kind
    sections: Sequence[GradientSection] = ()


@dataclasses.dataclass(frozen=True)
class Staging:
    """What became of a part.

    Attributes:
        peaks: table id -> largest magnitude of its gradients, unscaled; of a staged part.
        outcome: how its number has ended, if its step is decided already; None: it is staged.
        repeated: it had been staged, or its number closed, before.
    """

    peaks: Mapping[int, float]
    outcome: Outcome | None = None
    repeated: bool = False


def set_group(state: ShardState, group: Group, step: int) -> GroupEntry:
    """Takes over a group's members; a version that is not newer changes nothing.

    Args:
        state: the shard's.
        group: as home has it.
        step: its last decided step. A shard that is behind it here never will be told of what it lacks: it did not know the
            group, or home has started empty since.
    """
    entry = state.groups.find(group.name)
    if entry is not None and group.version <= entry.group.version:
        return entry
    new = GroupEntry(group, step) if entry is None else GroupEntry(group, max(step, entry.step), entry.decision)
    with state.journaled(change_records.group_record(state.change_number + 1, group, new.step)):
        state.groups.put(new)
    return new


def stage(state: ShardState, part: IncomingPart) -> Staging:
    """Keeps a member's part until its step is decided, or answers its repeat.

    Raises:
        NotAMember: the client is a member of no group.
        GroupMismatch: its group is not sync, or it has another rank there.
        ShardNotReady: an earlier step is not carried out here yet (retryable).
        ShardamError: the part is refused, or its number does not fit; nothing has changed.
    """
    client_id = part.origin.client_id
    state.clients.touch(client_id)
    former = state.clients.former(part.origin)
    if former is not None:
        return Staging({}, former, repeated=True)
    staged = state.groups.part(client_id)
    if staged is not None and staged.origin.number == part.origin.number:
        return _repeat(staged, part.origin)
    entry, member = state.groups.require_member(client_id)
    if entry.group.terms.mode != "sync" or member.rank != part.rank:
        raise GroupMismatch(
            f"client {client_id.hex()} is rank {member.rank} of group {entry.group.name!r} ({entry.group.terms}), its part "
            f"says rank {part.rank} of a sync group"
        )
    if part.step <= entry.step:
        return Staging({}, _close_late(state, entry, part))
    if part.step > entry.step + 1:
        raise ShardNotReady(f"step {part.step} comes after step {entry.step} of group {entry.group.name!r} here; try again")
    return _stage_new(state, entry, part)


def _repeat(staged: StagedPart, origin: Origin) -> Staging:
    if staged.origin.digest != origin.digest:
        raise SequenceError(
            f"number {origin.number} was used with another content; a change needs a number of its own",
            reason="SEQUENCE_REUSED",
            metadata={"last": str(origin.number), "number": str(origin.number)},
        )
    return Staging(_peaks(staged), repeated=True)


def _close_late(state: ShardState, entry: GroupEntry, part: IncomingPart) -> Outcome:
    """Closes the number of a contribution to a step that was decided without it; nothing of it is applied."""
    refusal = None if entry.decision is None else entry.decision.refusal
    if refusal is None or entry.step != part.step:
        refusal = Refusal(
            "STEP_TIMEOUT",
            f"step {part.step} of group {entry.group.name!r} was decided without rank {part.rank}; its gradient was dropped, "
            f"and the group goes on with step {entry.step + 1}",
            {"group": entry.group.name, "rank": str(part.rank), "step": str(part.step)},
        )
    result = StepResult(part.step, "refused", 0, {}, refusal)
    outcome = Outcome(result=result)
    with state.journaled(change_records.close_record(state.change_number + 1, part.origin, {}, result)):
        state.close_number(part.origin, outcome)
    return outcome


def _stage_new(state: ShardState, entry: GroupEntry, part: IncomingPart) -> Staging:
    merged = {section.table.table_id: merge_section(section) for section in part.sections}
    tables = [section.table for section in part.sections]
    new = StagedPart(part.origin, entry.group.name, part.step, part.rank, part.kind, merged)
    with state.write_locks(tables):
        for table, num_new in _new_rows(state, tables, merged):
            table.reserve(num_new)
        with state.journaled(change_records.part_record(state.change_number + 1, new, part.sections)):
            state.groups.put_part(new)
    return Staging(_peaks(new))


def _new_rows(state: ShardState, tables: Sequence[Table], merged: Mapping[int, MergedGradient]) -> list[tuple[Table, int]]:
    """Counts the rows that all staged parts and this one will create in its tables.

    Raises:
        RowLimit: too many; a decision must not fail.
    """
    parts = [*(part.tables for part in state.groups.parts()), merged]
    gradients = {table: [part[table.table_id] for part in parts if table.table_id in part] for table in tables}
    counted = [(table, sum(gradient.num_new for gradient in ones)) for table, ones in gradients.items()]
    try:
        check_room(counted, state.num_rows, state.max_rows)
    except RowLimit:  # ranks may name the same new rows
        row_ids = {table: np.concatenate([gradient.row_ids for gradient in ones]) for table, ones in gradients.items()}
        counted = [(table, table.count_new(np.unique(ids))) for table, ids in row_ids.items()]
        check_room(counted, state.num_rows, state.max_rows)
    return counted


def _peaks(part: StagedPart) -> dict[int, float]:
    return {table_id: gradient.peak for table_id, gradient in part.tables.items()}


def decide(state: ShardState, decision: Decision, recorded: Mapping[int, RecordedStep] | None = None) -> GroupEntry:
    """Carries out a decided step: merges exactly its parts, applies them once, closes its numbers, drops other parts of it.

    A step that is carried out already is passed over.

    Args:
        state: the shard's.
        decision: the step after the group's last one here.
        recorded: of a decision that is replayed: table id -> the step it was.

    Raises:
        ShardNotReady: the group is not known here, or an earlier step is missing.
        ShardamError: a part is missing, or the step cannot be applied; nothing has changed.
    """
    entry = state.groups.find(decision.group)
    if entry is None or decision.step > entry.step + 1:
        last = "not known" if entry is None else f"at step {entry.step}"
        raise ShardNotReady(f"group {decision.group!r} is {last} here, step {decision.step} cannot be carried out; try again")
    if decision.step <= entry.step:
        return entry
    sections = sections_of(state, decision, recorded)

    def record(steps: Sequence[StagedTableStep]) -> change_records.Change:
        return change_records.decision_record(state.change_number + 1, decision, sections, steps)

    def close(steps: Mapping[int, int]) -> None:
        _close(state, entry, decision, steps)

    if sections:
        updates = [(section.table, section.table.prepare(section)) for section in sections]
        state.step_tables(updates, record, close, limited=False)
    else:
        with state.journaled(record([])):
            close({})
    return entry


def sections_of(
    state: ShardState, decision: Decision, recorded: Mapping[int, RecordedStep] | None = None
) -> list[GradientSection]:
    """Returns the merged gradients of a step, or nothing if it is not applied.

    Raises:
        ShardamError: a part of it is not here.
    """
    entry = state.groups.find(decision.group)
    if decision.end != "applied" or entry is None:
        return []
    try:
        parts = counted_parts(decision, {part.origin.client_id: part for part in state.groups.parts()})
    except LookupError as error:
        raise ShardamError(f"step {decision.step} of group {decision.group!r} cannot be carried out: {error}") from error
    tables = {table_id: state.table(table_id) for part in parts for table_id in part.tables}
    return merged_sections(entry.group.terms, len(decision.contributions), parts, tables, recorded)


def check_step(state: ShardState, decision: Decision) -> None:
    """Checks whether a step's merged gradients may be applied; changes nothing.

    Raises:
        NonFiniteGradient: a sum over the ranks, unscaled, is NaN or at least 2**64 in magnitude.
        ShardamError: a part is missing.
    """
    for section in sections_of(state, decision):
        section.table.prepare(section)


def check_here(state: ShardState, decision: Decision) -> Refusal | None:
    """Returns why a step's merged gradients may not be applied; on the sequencer's thread."""
    try:
        check_step(state, decision)
    except ShardamError as error:
        return Refusal.of(error)
    return None


def _close(state: ShardState, entry: GroupEntry, decision: Decision, steps: Mapping[int, int]) -> None:
    contributions = decision.contributions
    result = StepResult(decision.step, decision.end, len(contributions), dict(steps), decision.refusal)
    outcome = Outcome(steps=dict(steps), result=result)
    restart_counts = [entry.group.complete_restart_count]
    for one in contributions:
        part = state.groups.part(one.client_id)
        digest = part.origin.digest if part is not None and part.origin.number == one.number else DECIDED
        state.close_number(Origin(one.client_id, one.number, digest), outcome)
        member = entry.group.member(one.client_id)
        if member is not None:
            restart_counts.append(member.restart_count)
    state.groups.drop_parts(decision.group, decision.step)
    entry.step, entry.decision = decision.step, decision
    entry.group = dataclasses.replace(entry.group, complete_restart_count=max(restart_counts))
