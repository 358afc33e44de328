"""Groups, decisions and results as messages and back."""

from __future__ import annotations

from collections.abc import Mapping

from shardam_proto.errors import BadOption
from shardam_proto.v1 import common_pb2, group_pb2
from shardam_server.shard.groups.values import (
    Contribution,
    Decision,
    End,
    Group,
    GroupTerms,
    Kind,
    Member,
    Mode,
    Reduce,
    Refusal,
    StepResult,
)

_MODES: Mapping[group_pb2.GroupMode.ValueType, Mode] = {
    group_pb2.GROUP_MODE_SYNC: "sync",
    group_pb2.GROUP_MODE_BOUNDED: "bounded",
}
_REDUCES: Mapping[group_pb2.Reduce.ValueType, Reduce] = {
    group_pb2.REDUCE_MEAN: "mean",
    group_pb2.REDUCE_SUM: "sum",
}
_KINDS: Mapping[group_pb2.ContributionKind.ValueType, Kind] = {
    group_pb2.CONTRIBUTION_KIND_GRADIENT: "gradient",
    group_pb2.CONTRIBUTION_KIND_EMPTY: "empty",
    group_pb2.CONTRIBUTION_KIND_ABSTAIN: "abstain",
}
_ENDS: Mapping[group_pb2.StepEnd.ValueType, End] = {
    group_pb2.STEP_END_APPLIED: "applied",
    group_pb2.STEP_END_ABSTAINED: "abstained",
    group_pb2.STEP_END_REFUSED: "refused",
}
_MODE_VALUES = {mode: value for value, mode in _MODES.items()}
_REDUCE_VALUES = {reduce: value for value, reduce in _REDUCES.items()}
_KIND_VALUES = {kind: value for value, kind in _KINDS.items()}
_END_VALUES = {end: value for value, end in _ENDS.items()}


def decode_kind(value: group_pb2.ContributionKind.ValueType) -> Kind:
    """Converts what a member contributes.

    Raises:
        BadOption: it is none that this version knows.
    """
    if value not in _KINDS:
        raise BadOption(f"a push in a sync group says what it contributes: gradient, empty or abstain; got {value}")
    return _KINDS[value]


def encode_kind(kind: Kind) -> group_pb2.ContributionKind.ValueType:
    """Converts what a member contributes."""
    return _KIND_VALUES[kind]


def decode_terms(message: group_pb2.GroupTerms) -> GroupTerms:
    """Converts a group's terms.

    Raises:
        BadOption: a mode or reduction that this version does not know, one that does not go with the other, or no ranks.
    """
    if message.mode not in _MODES or message.reduce not in _REDUCES:
        raise BadOption(
            f"a group is sync or bounded and merges by mean or sum; got mode {message.mode}, reduce {message.reduce}"
        )
    if message.world_size < 1:
        raise BadOption(f"world_size must be at least 1, got {message.world_size}")
    terms = GroupTerms(_MODES[message.mode], message.world_size, message.max_staleness, _REDUCES[message.reduce])
    if terms.mode == "sync" and terms.max_staleness:
        raise BadOption(f"max_staleness is of bounded groups; a sync group has none, got {terms.max_staleness}")
    if terms.mode == "bounded" and terms.reduce != "mean":
        raise BadOption(f"reduce is of sync groups; a bounded group merges nothing, got reduce={terms.reduce!r}")
    return terms


def encode_terms(terms: GroupTerms) -> group_pb2.GroupTerms:
    """Converts a group's terms."""
    return group_pb2.GroupTerms(
        mode=_MODE_VALUES[terms.mode],
        max_staleness=terms.max_staleness,
        reduce=_REDUCE_VALUES[terms.reduce],
        world_size=terms.world_size,
    )


def decode_group(message: group_pb2.Group) -> Group:
    """Converts a group.

    Raises:
        BadOption: as decode_terms.
    """
    members = tuple(Member(one.rank, one.client_id, one.restart_count, one.first_step) for one in message.members)
    return Group(message.name, decode_terms(message.terms), message.version, members, message.complete_restart_count)


def encode_group(group: Group) -> group_pb2.Group:
    """Converts a group."""
    return group_pb2.Group(
        name=group.name,
        terms=encode_terms(group.terms),
        version=group.version,
        members=[
            group_pb2.GroupMember(
                rank=member.rank,
                client_id=member.client_id,
                restart_count=member.restart_count,
                first_step=member.first_step,
            )
            for member in group.members
        ],
        complete_restart_count=group.complete_restart_count,
    )


def decode_refusal(message: group_pb2.StepRefusal) -> Refusal:
    """Converts why a step is refused."""
    return Refusal(message.reason, message.message, dict(message.metadata))


def encode_refusal(refusal: Refusal | None) -> group_pb2.StepRefusal | None:
    """Converts why a step is refused, if it is."""
    if refusal is None:
        return None
    return group_pb2.StepRefusal(reason=refusal.reason, message=refusal.message, metadata=refusal.metadata)


def decode_decision(message: group_pb2.Decision) -> Decision:
    """Converts a decision.

    Raises:
        BadOption: an end or a kind that this version does not know.
    """
    contributions = tuple(
        Contribution(one.rank, one.client_id, one.number, decode_kind(one.kind)) for one in message.contributions
    )
    refusal = decode_refusal(message.refusal) if message.HasField("refusal") else None
    return Decision(message.group, message.step, contributions, _end(message.end), refusal)


def encode_decision(decision: Decision) -> group_pb2.Decision:
    """Converts a decision."""
    return group_pb2.Decision(
        group=decision.group,
        step=decision.step,
        contributions=[
            group_pb2.Contribution(rank=one.rank, client_id=one.client_id, number=one.number, kind=encode_kind(one.kind))
            for one in decision.contributions
        ],
        end=_END_VALUES[decision.end],
        refusal=encode_refusal(decision.refusal),
    )


def decode_result(message: group_pb2.StepResult) -> StepResult:
    """Converts how a step ended.

    Raises:
        BadOption: an end that this version does not know.
    """
    steps = {step.table_id: step.table_step for step in message.steps}
    refusal = decode_refusal(message.refusal) if message.HasField("refusal") else None
    return StepResult(message.step, _end(message.end), message.num_contributions, steps, refusal)


def encode_result(result: StepResult | None) -> group_pb2.StepResult | None:
    """Converts how a step ended, if it has."""
    if result is None:
        return None
    return group_pb2.StepResult(
        step=result.step,
        end=_END_VALUES[result.end],
        num_contributions=result.num_contributions,
        steps=[common_pb2.TableStep(table_id=table_id, table_step=step) for table_id, step in result.steps.items()],
        refusal=encode_refusal(result.refusal),
    )


def _end(value: group_pb2.StepEnd.ValueType) -> End:
    if value not in _ENDS:
        raise BadOption(f"a step is applied, abstained from or refused; got {value}; use matching shardam packages")
    return _ENDS[value]
