"""What an optimizer step becomes in each mode: a push, a contribution, an empty step, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shardam._contributions import Contribution, EmptyStep
from shardam._parts import PushChange, TableStepGradient, push_change, push_parts
from shardam._session import Session
from shardam_proto.errors import ShardamError
from shardam_proto.v1 import group_pb2

StepKind = Literal["gradient", "empty", "abstain"]
"""What a step contributes: gradients; none, since no table had one; or none on purpose (GradScaler found an inf)."""

StepChange = PushChange | Contribution | EmptyStep

_KINDS = {
    "gradient": group_pb2.CONTRIBUTION_KIND_GRADIENT,
    "empty": group_pb2.CONTRIBUTION_KIND_EMPTY,
    "abstain": group_pb2.CONTRIBUTION_KIND_ABSTAIN,
}


def step_change(session: Session, sections: Sequence[TableStepGradient], kind: StepKind) -> StepChange | None:
    """Builds what a step sends.

    A member of a group sends something in every step: others wait for it, or count it.

    Args:
        session: the client.
        sections: the tables that step, each once; none unless the kind is gradient.
        kind: what the step contributes.

    Returns:
        The change, or None: in async a step without a gradient is none.

    Raises:
        MessageTooLarge: a shard's part is too large.
    """
    membership, route_map = session.membership, session.route_map
    if membership is not None and membership.options.is_sync:
        return Contribution(push_parts(sections, route_map, _KINDS[kind]), route_map)
    if kind == "gradient":
        return push_change(sections, route_map)
    return None if membership is None else EmptyStep(route_map)


def refused_step(session: Session, error: ShardamError) -> StepChange | None:
    """Builds what a step sends that this client refuses itself: in a sync group it is then refused for all members.

    Args:
        session: the client.
        error: why; raised by the caller.
    """
    change = step_change(session, (), "abstain")
    if isinstance(change, Contribution):
        change.own_refusal = error
    return change


def table_step_after(change: StepChange, table_id: int) -> int:
    """Returns a table's step on home after a step that was applied; 0: it did not step."""
    match change:
        case Contribution():
            steps = [] if change.result is None else list(change.result.steps)
        case EmptyStep():
            steps = []
        case _:
            steps = list(change.answers[0].steps)
    return next((step.table_step for step in steps if step.table_id == table_id), 0)
