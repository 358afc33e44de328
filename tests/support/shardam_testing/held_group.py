"""A group of workers on a held shard, with the test in home's place: its members, its decisions, what they send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2, row_pb2
from shardam_server.shard.groups.changes import decide, set_group
from shardam_server.shard.groups.values import Contribution, Decision, End, Group, GroupTerms, Kind, Member, Refusal
from shardam_testing.held_shard import HeldShard
from shardam_testing.raw_client import RawClient, id_bytes
from shardam_testing.raw_stream import RawStream, Request
from shardam_testing.waiting import wait_for

SYNC = GroupTerms("sync", 2, reduce="sum")

GRADIENT = group_pb2.CONTRIBUTION_KIND_GRADIENT
EMPTY = group_pb2.CONTRIBUTION_KIND_EMPTY
ABSTAIN = group_pb2.CONTRIBUTION_KIND_ABSTAIN


class HeldGroup:
    """A group of one shard's clients.

    Args:
        shard: the shard.
        terms: what its members agree on.
        clients: its first members, by rank.
    """

    def __init__(self, shard: HeldShard, terms: GroupTerms, clients: Sequence[RawClient]) -> None:
        self._shard = shard
        members = tuple(Member(rank, client.client_id) for rank, client in enumerate(clients))
        complete = 0 if len(members) == terms.world_size else -1
        self.group = Group("workers", terms, 1, members, complete)
        self._tell()

    def _tell(self) -> None:
        shard = self._shard.shard
        self._shard.run(shard.change(lambda: set_group(shard.state, self.group, 0)))

    def join(self, client: RawClient, first_step: int) -> None:
        """Takes a client in as the next rank."""
        member = Member(len(self.group.members), client.client_id, 0, first_step)
        members = (*self.group.members, member)
        complete = 0 if len(members) == self.group.terms.world_size else self.group.complete_restart_count
        self.group = dataclasses.replace(
            self.group, version=self.group.version + 1, members=members, complete_restart_count=complete
        )
        self._tell()

    def leave(self, client: RawClient) -> None:
        """Takes a member out."""
        members = tuple(member for member in self.group.members if member.client_id != client.client_id)
        self.group = dataclasses.replace(self.group, version=self.group.version + 1, members=members)
        self._tell()

    def decide(self, step: int, numbers: Sequence[int], end: End = "applied", kind: Kind = "gradient") -> None:
        """Carries a step out to which the first ranks contribute with these numbers."""
        contributions = tuple(
            Contribution(member.rank, member.client_id, number, kind)
            for member, number in zip(self.group.members, numbers, strict=False)
        )
        refusal = Refusal("NON_FINITE_GRADIENT", "rank 0: inf") if end == "refused" else None
        shard, decision = self._shard.shard, Decision("workers", step, contributions, end, refusal)
        self._shard.run(shard.change(lambda: decide(shard.state, decision)))

    def end_client(self, client: RawClient) -> None:
        """Ends a client, as home does when it is dropped."""
        shard = self._shard.shard
        self._shard.run(shard.change(lambda: shard.state.end_client(client.client_id)))


def part(
    client: RawClient,
    number: int,
    step: int,
    rank: int,
    table: common_pb2.TableInfo,
    row_ids: Sequence[int],
    gradients: npt.ArrayLike,
    **changes: float,
) -> embedding_pb2.PushRequest:
    """What a member sends for a step: gradients of one table."""
    request = client.push_request(number, table, row_ids, gradients, step=step, rank=rank, **changes)
    request.contribution = GRADIENT
    return request


def without_gradient(
    client: RawClient, number: int, step: int, rank: int, kind: group_pb2.ContributionKind.ValueType = EMPTY
) -> embedding_pb2.PushRequest:
    """What a member sends for a step in which it has no gradient, or abstains."""
    return embedding_pb2.PushRequest(header=client.header(number, step=step, rank=rank), contribution=kind)


def pull_of(
    client: RawClient, tables: Sequence[common_pb2.TableInfo], row_ids: Sequence[int], **changes: float
) -> embedding_pb2.PullRequest:
    """A pull of the same rows of each of several tables; a training pull with step=."""
    sections = [
        common_pb2.Section(table_id=table.table_id, num_rows=len(row_ids), dtype=common_pb2.DTYPE_FLOAT32) for table in tables
    ]
    return embedding_pb2.PullRequest(
        header=client.header(0, **changes), sections=sections, row_ids=id_bytes(list(row_ids) * len(tables))
    )


def reason_of(action: Callable[[], object]) -> str:
    """Returns the reason for which an action is refused."""
    with pytest.raises(ShardamError) as error:
        action()
    return error.value.reason


def assign_request(client: RawClient, number: int, table: common_pb2.TableInfo, **changes: float) -> row_pb2.AssignRowsRequest:
    """Writes row 4: all sevens."""
    return row_pb2.AssignRowsRequest(
        header=client.header(number, **changes),
        table_id=table.table_id,
        row_ids=id_bytes([4]),
        weight=np.full(2, 7, "<f4").tobytes(),
    )


def parked(client: RawClient, count: int) -> None:
    """Waits until so many requests are parked."""
    wait_for(f"{count} requests to be parked", lambda: client.status().parked_requests == count)


def unary_push(client: RawClient, request: embedding_pb2.PushRequest) -> embedding_pb2.PushResponse:
    answer: embedding_pb2.PushResponse = client.call(client.embedding.Push, request)
    return answer


def refused(stream: RawStream, request: Request) -> str:
    """Sends a request and returns the reason for which it is refused."""
    return reason_of(lambda: stream.ask(request))
