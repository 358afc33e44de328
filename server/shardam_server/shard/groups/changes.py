"""Changes of a shard's state that groups make: members, parts that are staged, steps that are decided.

On the sequencer's thread; each is whole in the journal before it is applied, as every change is.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping, Sequence

from shardam_proto.errors import BadOption, GroupMismatch, JournalDamaged, ShardamError, ShardNotReady
from shardam_server.shard.clients import ANY_CONTENT, Origin, Outcome, number_reused
from shardam_server.shard.groups.entries import GroupEntry, StagedPart
from shardam_server.shard.groups.parts import counted_parts, merge_section, merged_sections
from shardam_server.shard.groups.roster import stepped
from shardam_server.shard.groups.values import Decision, Group, Kind, Refusal, StepResult
from shardam_server.shard.journal import change_records
from shardam_server.shard.row_limits import check_room
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, RecordedStep, StagedTableStep

NO_STEPS: Mapping[int, int] = types.MappingProxyType({})
"""No table stepped."""


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


def update_group(state: ShardState, group: Group, step: int, decision: Decision | None) -> GroupEntry:
    """Takes over all that home tells of a group: its last decision first, which counts members that may be gone since.

    Args:
        state: the shard's.
        group: as home has it.
        step: its last decided step.
        decision: of that step; None: none yet.

    Raises:
        ShardamError: as decide.
    """
    entry = state.groups.find(group.name)
    if entry is not None and decision is not None and decision.step <= entry.step + 1:
        decide(state, decision)
    return set_group(state, group, step)


def set_group(state: ShardState, group: Group, step: int) -> GroupEntry:
    """Takes over a group's members; a version that is not newer changes nothing.

    Args:
        state: the shard's.
        group: as home has it.
        step: its last decided step. A shard that is behind it here never will be told of what it lacks: it did not know the
            group, or home has started empty since. Parts of the steps between are closed as late.
    """
    entry = state.groups.find(group.name)
    if entry is not None and group.version <= entry.group.version:
        return entry
    new = GroupEntry(group, step) if entry is None else GroupEntry(group, max(step, entry.step), entry.decision)
    with state.journaled(change_records.group_record(state.change_number + 1, group, new.step)):
        state.groups.put(new)
        _drop_parts(state, new)
    return new


def stage(state: ShardState, part: IncomingPart) -> Staging:
    """Keeps a member's part until its step is decided, or answers its repeat.

    Raises:
        ClientClosed: the client is unknown, or has left or was dropped.
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
    if staged is not None:
        return _repeat(staged, part)
    entry, member = state.groups.require_member(client_id)
    if entry.group.terms.mode != "sync" or member.rank != part.rank:
        raise GroupMismatch(
            f"client {client_id.hex()} is rank {member.rank} of group {entry.group.name!r} ({entry.group.terms}), its part "
            f"says rank {part.rank} of a sync group"
        )
    if part.step <= entry.step:
        return Staging({}, close_late(state, part.origin, _late_result(entry, part.step, part.rank)))
    if part.step > entry.step + 1:
        raise ShardNotReady(f"step {part.step} comes after step {entry.step} of group {entry.group.name!r} here; try again")
    return _stage_new(state, entry.group, part)


def _repeat(staged: StagedPart, part: IncomingPart) -> Staging:
    """Answers the repeat of a staged part, which has its client's next number, as the repeat has."""
    if (staged.origin.digest, staged.step, staged.rank, staged.kind) != (part.origin.digest, part.step, part.rank, part.kind):
        raise number_reused(part.origin.number, part.origin.number - 1)
    return Staging(_peaks(staged), repeated=True)


def _late_result(entry: GroupEntry, step: int, rank: int) -> StepResult:
    """Returns how a step ended for a contribution that came after its decision, or was staged and not counted."""
    decision, name = entry.decision, entry.group.name
    refusal = decision.refusal if decision is not None and decision.step == step else None
    if refusal is None:
        refusal = Refusal(
            "STEP_TIMEOUT",
            f"step {step} of group {name!r} was decided without rank {rank}; its gradient was dropped, and the group goes on "
            f"with step {entry.step + 1}",
            {"group": name, "rank": str(rank), "step": str(step)},
        )
    return StepResult(step, "refused", 0, {}, refusal)


def close_late(state: ShardState, origin: Origin, result: StepResult) -> Outcome:
    """Closes the number of a contribution that came too late; nothing of it is applied."""
    outcome = Outcome(result=result)
    with state.journaled(change_records.close_record(state.change_number + 1, origin, {}, result)):
        state.close_number(origin, outcome)
    return outcome


def _stage_new(state: ShardState, group: Group, part: IncomingPart) -> Staging:
    if part.sections and part.kind != "gradient":
        raise BadOption(f"a contribution of kind {part.kind!r} names no table, this one names {len(part.sections)}")
    merged = {section.table.table_id: merge_section(section, state.device.num_threads) for section in part.sections}
    new = StagedPart(part.origin, group.name, part.step, part.rank, part.kind, merged)
    named = [(section.table, merged[section.table.table_id].row_ids) for section in part.sections]
    # Room is made now: a decided step must not be refused.
    num_new = {table: count for table, count in state.pending_rows.count(state.change_number, named) if count}
    check_room(list(num_new.items()), state.num_rows, state.max_rows)
    growing = [table for table, _ in named if table in num_new]
    with state.write_locks(growing):
        for table in growing:
            table.reserve(num_new[table])
    state.pending_rows.add(named)
    with state.journaled(change_records.part_record(state.change_number + 1, new, part.sections)):
        state.groups.put_part(new)
    state.pending_rows.keep(state.change_number)
    return Staging(_peaks(new))


def _peaks(part: StagedPart) -> dict[int, float]:
    return {table_id: gradient.peak for table_id, gradient in part.tables.items()}


def decide(state: ShardState, decision: Decision, recorded: Mapping[int, RecordedStep] | None = None) -> GroupEntry:
    """Carries out a decided step: merges exactly its parts, applies them once, and closes its numbers.

    Other parts of the step are dropped, and their numbers closed as late. A step that is carried out already is passed over;
    of one whose numbers were closed here because another shard started empty, nothing is left to apply.

    Args:
        state: the shard's.
        decision: the step after the group's last one here.
        recorded: of a decision that is replayed: table id -> the step it was.

    Raises:
        ShardNotReady: the group is not known here, or an earlier step is missing.
        GroupMismatch: this step was carried out here as another decision.
        JournalDamaged: the decision is replayed, and stepped other tables.
        ShardamError: a part is missing, or the step cannot be applied. Nothing has changed in each case.
    """
    entry = state.groups.find(decision.group)
    if entry is None or decision.step > entry.step + 1:
        last = "not known" if entry is None else f"at step {entry.step}"
        raise ShardNotReady(f"group {decision.group!r} is {last} here, step {decision.step} cannot be carried out; try again")
    if decision.step <= entry.step:
        _check_same(entry, decision)
        return entry
    sections = [] if _is_made_up_for(state, decision) else sections_of(state, decision, recorded)
    if recorded is not None and recorded.keys() != {section.table.table_id for section in sections}:
        raise JournalDamaged(
            f"step {decision.step} of group {decision.group!r} stepped tables {sorted(recorded)}, its parts name "
            f"{[section.table.table_id for section in sections]}"
        )

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


def _is_made_up_for(state: ShardState, decision: Decision) -> bool:
    """Whether the first number of a step, with which its tables step, is closed here before the step is told."""
    first = next(iter(decision.contributions), None)
    client = None if first is None else state.clients.find(first.client_id)
    return first is not None and client is not None and client.last_number >= first.number


def _check_same(entry: GroupEntry, decision: Decision) -> None:
    if entry.decision is not None and entry.decision.step == decision.step and entry.decision != decision:
        raise GroupMismatch(
            f"step {decision.step} of group {decision.group!r} was carried out here as {entry.decision}, now home says "
            f"{decision}: one of the two shards came back without changes that it had acknowledged"
        )


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
        parts = counted_parts(decision, state.groups.parts_by_client())
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
    """Notes that a step is carried out, and how it ended for each part; cannot fail."""
    entry.step, entry.decision, entry.group = decision.step, decision, stepped(entry.group, decision)
    result = StepResult(decision.step, decision.end, len(decision.contributions), dict(steps), decision.refusal)
    counted: set[tuple[bytes, int]] = set()
    for one in decision.contributions:
        part = state.groups.part(one.client_id)
        known = part is not None and part.origin.number == one.number
        origin = part.origin if part is not None and known else Origin(one.client_id, one.number, ANY_CONTENT)
        _close_number(state, origin, result, {} if counted else steps)
        counted.add((one.client_id, one.number))
    _drop_parts(state, entry, counted)


def _drop_parts(state: ShardState, entry: GroupEntry, counted: Collection[tuple[bytes, int]] = ()) -> None:
    """Drops the parts of steps that are behind, and closes the numbers of those that were not counted."""
    for part in state.groups.drop_parts(entry.group.name, entry.step):
        if (part.origin.client_id, part.origin.number) not in counted:
            _close_number(state, part.origin, _late_result(entry, part.step, part.rank))


def _close_number(state: ShardState, origin: Origin, result: StepResult, steps: Mapping[int, int] = NO_STEPS) -> None:
    """Closes a contribution's number.

    Args:
        state: the shard's.
        origin: client and number.
        result: how the step ended.
        steps: table id -> its step after it, of one number of the step alone: where a shard started empty, the numbers that
            another one lacks are made up for there one by one, and tables step once.
    """
    client = state.clients.find(origin.client_id)
    if client is not None and client.last_number < origin.number:
        state.close_number(origin, Outcome(dict(steps), result=result))
