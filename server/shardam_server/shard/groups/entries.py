"""The groups that a shard knows, and the parts that wait there for a decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import NotAMember, SequenceError
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.values import Decision, Group, Kind, Member
from shardam_server.shard.records import Float32s, Int64s


@dataclasses.dataclass(frozen=True)
class MergedGradient:
    """One table's gradient of one part, summed by row.

    Attributes:
        row_ids: int64 [U], distinct, without the padding row.
        gradients: float32 [U, dim]; each the left-to-right sum of its row's gradients, neither unscaled nor divided.
        options: hyper-parameters.
        grad_scale: loss scale of the gradients.
        peak: largest magnitude once unscaled.
        num_new: rows of it that did not exist when it was staged.
    """

    row_ids: Int64s
    gradients: Float32s
    options: AdamOptions
    grad_scale: float
    peak: float
    num_new: int


@dataclasses.dataclass(frozen=True)
class StagedPart:
    """A member's part of a step that is not decided yet.

    Attributes:
        origin: client, number and digest that it came as.
        group: the group's name.
        step: the step.
        rank: the member's.
        kind: what it contributes.
        tables: table id -> gradient, in the order of the push; empty unless kind is gradient.
    """

    origin: Origin
    group: str
    step: int
    rank: int
    kind: Kind
    tables: Mapping[int, MergedGradient]

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and gradients that it keeps."""
        return sum(table.row_ids.nbytes + table.gradients.nbytes for table in self.tables.values())


@dataclasses.dataclass
class GroupEntry:
    """A group on this shard.

    Attributes:
        group: as of the last change of membership that this shard knows.
        step: sync: the last step that is carried out here.
        decision: of that step; None: none yet, or made before this shard knew the group.
    """

    group: Group
    step: int = 0
    decision: Decision | None = None


class Groups:
    """All groups of a shard. Changed on the sequencer's thread alone; read from any."""

    def __init__(self) -> None:
        self._entries: dict[str, GroupEntry] = {}
        self._parts: dict[bytes, StagedPart] = {}

    def __iter__(self) -> Iterator[GroupEntry]:
        """Yields all groups, by name."""
        return iter([self._entries[name] for name in sorted(self._entries)])

    # -- questions

    def find(self, name: str) -> GroupEntry | None:
        """Returns a group, or None."""
        return self._entries.get(name)

    def of_client(self, client_id: bytes) -> tuple[GroupEntry, Member] | None:
        """Returns the group that a client is a member of, and its membership, or None."""
        for entry in list(self._entries.values()):
            member = entry.group.member(client_id)
            if member is not None:
                return entry, member
        return None

    def require_member(self, client_id: bytes) -> tuple[GroupEntry, Member]:
        """Returns the group that a client is a member of, and its membership.

        Raises:
            NotAMember: of none.
        """
        found = self.of_client(client_id)
        if found is None:
            raise NotAMember(
                f"client {client_id.hex()} is a member of no group here: it was dropped, or has not joined; join again"
            )
        return found

    def exclusive(self) -> Group | None:
        """Returns the sync group that has members, or None; while there is one, changes from outside are refused."""
        return next((entry.group for entry in list(self._entries.values()) if entry.group.exclusive), None)

    def check_row_change(self, origin: Origin | None) -> None:
        """Refuses a change of rows from outside a sync group.

        Raises:
            NotAMember: there is one, and the change does not come from a member.
        """
        group = self.exclusive()
        if group is not None and (origin is None or group.member(origin.client_id) is None):
            raise _outsider(group)

    def check_number(self, origin: Origin) -> None:
        """Refuses a number that waits as a staged part.

        Raises:
            SequenceError: it does (SEQUENCE_REUSED).
        """
        part, number = self.part(origin.client_id), str(origin.number)
        if part is not None and part.origin.number == origin.number:
            raise SequenceError(
                f"number {number} waits as a part of step {part.step} of group {part.group!r}; a change needs one of its own",
                reason="SEQUENCE_REUSED",
                metadata={"last": number, "number": number},
            )

    def check_push(self) -> None:
        """Refuses a push that is no contribution to a step while there is a sync group.

        Raises:
            NotAMember: there is one.
        """
        group = self.exclusive()
        if group is not None:
            raise _outsider(group)

    def part(self, client_id: bytes) -> StagedPart | None:
        """Returns a client's staged part, or None; a client has at most one."""
        return self._parts.get(client_id)

    def parts(self) -> list[StagedPart]:
        """Returns all staged parts, the oldest first."""
        return list(self._parts.values())

    # -- changes; checked before, so that they cannot fail

    def put(self, entry: GroupEntry) -> None:
        """Adds or replaces a group."""
        self._entries[entry.group.name] = entry

    def put_part(self, part: StagedPart) -> None:
        """Adds a client's part."""
        self._parts[part.origin.client_id] = part

    def drop_part(self, client_id: bytes) -> None:
        """Drops a client's part, if there is one."""
        self._parts.pop(client_id, None)

    def drop_parts(self, name: str, step: int) -> None:
        """Drops a group's parts up to a step."""
        for client_id, part in list(self._parts.items()):
            if part.group == name and part.step <= step:
                del self._parts[client_id]


def _outsider(group: Group) -> NotAMember:
    ranks = ", ".join(str(member.rank) for member in group.members)
    return NotAMember(
        f"group {group.name!r} trains in {group.terms} (ranks {ranks} are there), so changes from outside are refused; connect "
        f"with mode='sync', group={group.name!r}, or wait until its members have left",
        metadata={"group": group.name},
    )
