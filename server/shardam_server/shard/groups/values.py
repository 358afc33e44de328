"""What a group of workers is, as values; messages.py converts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from shardam_proto.errors import ShardamError, make_error

Mode = Literal["sync", "bounded"]
Reduce = Literal["mean", "sum"]
Kind = Literal["gradient", "empty", "abstain"]
End = Literal["applied", "abstained", "refused"]

NEVER_COMPLETE = -1
"""complete_restart_count of a group whose ranks have not all been there yet."""


@dataclasses.dataclass(frozen=True)
class GroupTerms:
    """What all members agree on.

    Attributes:
        mode: what a step means.
        max_staleness: bounded: how many steps a member may be behind another one's pull.
        reduce: sync: how gradients are merged.
        world_size: number of ranks.
    """

    mode: Mode
    world_size: int
    max_staleness: int = 0
    reduce: Reduce = "mean"

    def __str__(self) -> str:
        """Describes them in a message."""
        mode = f"bounded:{self.max_staleness}" if self.mode == "bounded" else f"sync (reduce={self.reduce})"
        return f"{mode} of {self.world_size} ranks"


@dataclasses.dataclass(frozen=True)
class Member:
    """One worker of a group.

    Attributes:
        rank: from 0.
        client_id: its client.
        restart_count: how often its launcher has restarted it.
        first_step: sync: the first step that it takes part in; bounded: the clock it joined with, plus 1.
    """

    rank: int
    client_id: bytes
    restart_count: int = 0
    first_step: int = 1


@dataclasses.dataclass(frozen=True)
class Group:
    """A group as of one change of its membership.

    Attributes:
        name: its name.
        terms: what its members agree on.
        version: grows with each change of membership.
        members: by ascending rank.
        complete_restart_count: restarts up to which all its ranks have been there; see missing_ranks.
    """

    name: str
    terms: GroupTerms
    version: int = 0
    members: tuple[Member, ...] = ()
    complete_restart_count: int = NEVER_COMPLETE

    def member(self, client_id: bytes) -> Member | None:
        """Returns a client's membership, or None."""
        return next((member for member in self.members if member.client_id == client_id), None)

    def missing_ranks(self) -> list[int]:
        """Returns the ranks that the group waits for because they have never been there, ascending.

        A group that starts waits for all ranks, so that its first step is the same in every run. Once it has been complete, a
        rank that is gone stops nobody. All members of a sync group being newer than that means that the whole group was
        restarted, and the others are still to come; see roster.stepped. A bounded group has no common steps by which that could
        be told from single restarts.
        """
        complete = self.complete_restart_count
        if self.terms.mode == "bounded" and complete != NEVER_COMPLETE:
            return []
        if any(member.restart_count <= complete for member in self.members):
            return []
        present = {member.rank for member in self.members}
        return [rank for rank in range(self.terms.world_size) if rank not in present]


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a step is refused for all members.

    Attributes:
        reason: of shardam_proto/errors.py.
        message: what was wrong, with which value, and what to do.
        metadata: the values of the message by name.
    """

    reason: str
    message: str
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, error: ShardamError) -> Refusal:
        """Returns an error as a value."""
        return cls(error.reason, error.message, error.metadata)

    def error(self) -> ShardamError:
        """Returns it as the error that is raised."""
        return make_error(self.reason, self.message, self.metadata)


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A member's contribution to a decided step.

    Attributes:
        rank: its rank.
        client_id: its client.
        number: the client's number that the step closes.
        kind: what it sent.
    """

    rank: int
    client_id: bytes
    number: int
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Decision:
    """What home decided about a step; the same on every shard.

    Attributes:
        group: the group's name.
        step: one after the group's last.
        contributions: those that are counted, by ascending rank.
        end: how the step ends.
        refusal: why, if refused.
    """

    group: str
    step: int
    contributions: tuple[Contribution, ...]
    end: End
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class StepResult:
    """How a step ended for a member.

    Attributes:
        step: the step.
        end: how it ended.
        num_contributions: contributions that were counted (K); zero: the member's came too late.
        steps: table id -> its step after it, for the tables that stepped.
        refusal: why, if refused.
    """

    step: int
    end: End
    num_contributions: int
    steps: Mapping[int, int] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None
