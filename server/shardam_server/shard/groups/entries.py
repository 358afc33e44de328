"""The groups that a shard knows, and the parts that wait there for a decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import NotAMember
from shardam_server.shard.clients import Clients, Origin, number_reused
from shardam_server.shard.groups.values import Decision, Group, Kind, Member
from shardam_server.shard.records import Float32s, Int64s


@dataclasses.dataclass(frozen=True)
class MergedGradient:
    """One table's gradient of one part, summed by row.

    Attributes:
        table: the table's name, for messages.
        row_ids: int64 [U], distinct, without the padding row.
        gradients: float32 [U, dim]; each the left-to-right sum of its row's gradients, neither unscaled nor divided.
        options: hyper-parameters.
        grad_scale: loss scale of the gradients.
        peak: largest magnitude, as it is or unscaled, whichever is more: what ranks' peaks add up to bounds each sum over the
            ranks, before and after it is unscaled.
    """

    table: str
    row_ids: Int64s
    gradients: Float32s
    options: AdamOptions
    grad_scale: float
    peak: float

    @property
    def hyper_parameters(self) -> str:
        """Options and loss scale as a message says them: equal for two gradients if, and only if, every bit of them is."""
        return f"{self.options}, grad_scale={self.grad_scale!r}"


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
    """All groups of a shard. Changed on the sequencer's thread alone; read from any.

    Args:
        clients: the shard's clients.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._entries: dict[str, GroupEntry] = {}
        self._members: dict[bytes, tuple[str, Member]] = {}
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
        found = self._members.get(client_id)
        return None if found is None else (self._entries[found[0]], found[1])

    def require_member(self, client_id: bytes) -> tuple[GroupEntry, Member]:
        """Returns the group that a client is a member of, and its membership.

        Raises:
            NotAMember: of none.
        """
        found = self.of_client(client_id)
        if found is None:
            raise NotAMember(
                f"client {client_id.hex()} is a member of no group here: it was dropped, or has not joined; connect again"
            )
        return found

    def exclusive(self) -> Group | None:
        """Returns the sync group that has members, or None; while there is one, changes from outside are refused.

        Members whose clients are all ended count no more: where home starts empty, nobody tells the others that they are gone.
        """
        groups = [entry.group for entry in list(self._entries.values()) if entry.group.terms.mode == "sync"]
        return next((group for group in groups if any(self._is_open(member) for member in group.members)), None)

    def _is_open(self, member: Member) -> bool:
        client = self._clients.find(member.client_id)
        return client is not None and not client.closed

    def check_row_change(self, origin: Origin | None) -> None:
        """Refuses a change of rows from outside a sync group.

        Raises:
            NotAMember: there is one, and the change does not come from a member.
        """
        group = self.exclusive()
        if group is not None and (origin is None or not self._is_member(group, origin.client_id)):
            raise _outsider(group)

    def _is_member(self, group: Group, client_id: bytes) -> bool:
        found = self._members.get(client_id)
        return found is not None and found[0] == group.name

    def check_push(self) -> None:
        """Refuses a push that is no contribution to a step while there is a sync group.

        Raises:
            NotAMember: there is one.
        """
        group = self.exclusive()
        if group is not None:
            raise _outsider(group)

    def check_number(self, origin: Origin) -> None:
        """Refuses a change under the number of its client's staged part, which the part's step will close.

        Raises:
            SequenceError: it has this number.
        """
        part = self._parts.get(origin.client_id)
        if part is not None and part.origin.number == origin.number:
            raise number_reused(origin.number, origin.number - 1)

    def part(self, client_id: bytes) -> StagedPart | None:
        """Returns a client's staged part, or None; a client has at most one."""
        return self._parts.get(client_id)

    def parts(self) -> list[StagedPart]:
        """Returns all staged parts, the oldest first."""
        return list(self._parts.values())

    def parts_by_client(self) -> dict[bytes, StagedPart]:
        """Returns all staged parts, by client id."""
        return dict(self._parts)

    # -- changes; checked before, so that they cannot fail

    def put(self, entry: GroupEntry) -> None:
        """Adds or replaces a group."""
        name = entry.group.name
        self._entries[name] = entry
        others = {client_id: found for client_id, found in self._members.items() if found[0] != name}
        # Another object, so that other threads see the members before or after.
        self._members = others | {member.client_id: (name, member) for member in entry.group.members}

    def put_part(self, part: StagedPart) -> None:
        """Adds a client's part."""
        self._parts[part.origin.client_id] = part

    def drop_part(self, client_id: bytes) -> None:
        """Drops a client's part, if there is one."""
        self._parts.pop(client_id, None)

    def drop_parts(self, name: str, step: int) -> list[StagedPart]:
        """Drops a group's parts up to a step and returns them."""
        dropped = [part for part in self._parts.values() if part.group == name and part.step <= step]
        for part in dropped:
            del self._parts[part.origin.client_id]
        return dropped


def _outsider(group: Group) -> NotAMember:
    ranks = ", ".join(str(member.rank) for member in group.members)
    return NotAMember(
        f"group {group.name!r} trains in {group.terms} (joined: {ranks}), so changes from outside are refused; connect "
        f"with mode='sync', group={group.name!r}, or wait until its members have left",
        metadata={"group": group.name},
    )
