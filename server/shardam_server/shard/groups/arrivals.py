"""The step that a sync group decides next: who has arrived, and what follows from it. Pure; on home alone.

What has arrived is in no journal: members tell it again to a home that was restarted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from shardam_server.shard.groups.entries import MergedGradient, StagedPart
from shardam_server.shard.groups.parts import SURE_LIMIT
from shardam_server.shard.groups.values import Contribution, Decision, Group, Refusal


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A member has its parts on all shards, or was refused by one.

    Attributes:
        client_id: the member's client.
        number: the client's number.
        peaks: table id -> the largest peak of its gradients on any shard; see MergedGradient.
        refusal: why a shard refused its part; None: all are staged.
    """

    client_id: bytes
    number: int
    peaks: Mapping[int, float] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What home is to decide.

    Attributes:
        decision: the decision.
        needs_check: True: only the shards can say whether the merged gradients may be applied; ask them first.
    """

    decision: Decision
    needs_check: bool = False


def missing_ranks(group: Group, arrived: Iterable[bytes]) -> list[int]:
    """Returns the ranks that a group's next step waits for, ascending: members on their way, and ranks still to join."""
    clients = set(arrived)
    late = [member.rank for member in group.members if member.client_id not in clients]
    return sorted({*late, *group.missing_ranks()})


def propose(group: Group, step: int, arrivals: Mapping[bytes, Arrival], parts: Mapping[bytes, StagedPart]) -> Proposal | None:
    """Returns what follows from who has arrived; None: the step waits.

    Args:
        group: the group, with at least one member.
        step: its next step.
        arrivals: client id -> arrival, of members.
        parts: client id -> part that is staged on home.
    """
    if len(arrivals) < len(group.members) or missing_ranks(group, arrivals):
        return None
    refusal = _first_refusal(group, arrivals)
    if refusal is None:
        staged = _staged(group, step, arrivals, parts)
        if len(staged) < len(group.members):
            return None  # a part that is not here could not be counted
        refusal = _mismatch(group, step, staged)
    if refusal is not None:
        return Proposal(refuse(group, step, arrivals, parts, refusal))
    contributions = _contributions(group, arrivals, parts)
    if all(one.kind == "abstain" for one in contributions):
        return Proposal(Decision(group.name, step, contributions, "abstained"))
    return Proposal(Decision(group.name, step, contributions, "applied"), _needs_check(staged, arrivals))


def give_up(
    group: Group, step: int, arrivals: Mapping[bytes, Arrival], parts: Mapping[bytes, StagedPart], waited_s: float
) -> Decision:
    """Returns the decision that ends a step for which ranks have not arrived in time: refused for those that have."""
    missing = missing_ranks(group, arrivals)
    ranks = ", ".join(map(str, missing))
    message = (
        f"step {step} of group {group.name!r} was given up: {'rank' if len(missing) == 1 else 'ranks'} {ranks} did not arrive "
        f"within {waited_s:.3g} s; look at what these workers do, or start shards with a longer --step-timeout-s"
    )
    metadata = {"group": group.name, "step": str(step), "ranks": ranks}
    return refuse(group, step, arrivals, parts, Refusal("STEP_TIMEOUT", message, metadata))


def refuse(
    group: Group, step: int, arrivals: Mapping[bytes, Arrival], parts: Mapping[bytes, StagedPart], refusal: Refusal
) -> Decision:
    """Returns the decision that refuses a step for all that have arrived."""
    return Decision(group.name, step, _contributions(group, arrivals, parts), "refused", refusal)


def _contributions(
    group: Group, arrivals: Mapping[bytes, Arrival], parts: Mapping[bytes, StagedPart]
) -> tuple[Contribution, ...]:
    contributions = []
    for member in group.members:
        arrival, part = arrivals.get(member.client_id), parts.get(member.client_id)
        if arrival is not None:
            kind = "gradient" if part is None else part.kind  # without a part here it is refused, whatever it was
            contributions.append(Contribution(member.rank, member.client_id, arrival.number, kind))
    return tuple(contributions)


def _staged(group: Group, step: int, arrivals: Mapping[bytes, Arrival], parts: Mapping[bytes, StagedPart]) -> list[StagedPart]:
    """Returns the parts that members arrived with, by rank, as far as they are here."""
    found = [parts[member.client_id] for member in group.members if member.client_id in parts]
    return [part for part in found if (part.origin.number, part.step) == (arrivals[part.origin.client_id].number, step)]


def _first_refusal(group: Group, arrivals: Mapping[bytes, Arrival]) -> Refusal | None:
    for member in group.members:
        refusal = arrivals[member.client_id].refusal
        if refusal is not None:
            message = f"rank {member.rank} of group {group.name!r}: {refusal.message}"
            return Refusal(refusal.reason, message, {**refusal.metadata, "rank": str(member.rank)})
    return None


def _mismatch(group: Group, step: int, parts: Iterable[StagedPart]) -> Refusal | None:
    """Finds hyper-parameters of one table that are not bit-equal on all ranks."""
    first: dict[int, tuple[int, MergedGradient]] = {}
    for part in parts:
        for table_id, gradient in part.tables.items():
            rank, former = first.setdefault(table_id, (part.rank, gradient))
            if gradient.hyper_parameters != former.hyper_parameters:
                message = (
                    f"step {step} of group {group.name!r}: table {gradient.table!r} has other hyper-parameters on rank "
                    f"{part.rank} ({gradient.hyper_parameters}) than on rank {rank} ({former.hyper_parameters}); all ranks "
                    f"must step with the same, to the last bit{_scale_remedy(gradient, former)}"
                )
                ranks = f"{rank}, {part.rank}"
                metadata = {"group": group.name, "step": str(step), "table": gradient.table, "ranks": ranks}
                return Refusal("GROUP_MISMATCH", message, metadata)
    return None


def _scale_remedy(one: MergedGradient, other: MergedGradient) -> str:
    """Says what to do if nothing but the loss scale differs: each rank's scaler has gone its own way."""
    if one.grad_scale == other.grad_scale or one.options != other.options:
        return ""
    return (
        ". Only the loss scale differs: use shardam.GradScaler with torch.distributed initialized on all ranks, which keeps "
        "their scales together"
    )


def _needs_check(parts: Iterable[StagedPart], arrivals: Mapping[bytes, Arrival]) -> bool:
    """True: what members told of their gradients does not prove that a sum over them can be applied."""
    sums: dict[int, float] = {}
    for part in parts:
        peaks = arrivals[part.origin.client_id].peaks
        if part.tables.keys() - peaks.keys():
            return True
        for table_id, peak in peaks.items():
            if not peak >= 0:  # no magnitude: it would hide another rank's; NaN is none, either
                return True
            sums[table_id] = sums.get(table_id, 0.0) + peak
    return any(total >= SURE_LIMIT for total in sums.values())
