"""The shards of one route map as a client sees them, and how it opens itself on one of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardam._link import ShardLink
from shardam_proto.errors import VersionMismatch, WrongCluster
from shardam_proto.limits import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2

if TYPE_CHECKING:
    from shardam._session import Session


@dataclasses.dataclass(frozen=True)
class Shards:
    """All shards of one route map; another map has other ones, in other processes.

    Attributes:
        route_map: bucket to shard.
        links: the shards, by index.
    """

    route_map: RouteMap
    links: tuple[ShardLink, ...]

    @property
    def epoch(self) -> int:
        """The map's epoch."""
        return self.route_map.epoch


class ShardsMoved(Exception):
    """The client has gone on to the shards of another route map: what was asked of the former ones is to be asked anew.

    Raised within the client alone.
    """


def open_client(session: Session, link: ShardLink, timeout_s: float) -> embedding_pb2.OpenResponse:
    """Registers a client on a shard, once; the request fits any incarnation.

    Raises:
        WrongCluster: the process at the address serves another cluster.
        ShardamError: the shard's reason.
    """
    header = common_pb2.RequestHeader(
        protocol_version=PROTOCOL_VERSION,
        cluster_id=session.cluster_id,
        client_id=session.client_id,
        request_id=session.next_request_id(),
        budget_s=timeout_s,
    )
    request = embedding_pb2.OpenRequest(
        header=header,
        min_protocol_version=MIN_PROTOCOL_VERSION,
        max_protocol_version=PROTOCOL_VERSION,
        heartbeats=True,
    )
    answer: embedding_pb2.OpenResponse = link.call(lambda target: target.embedding.Open, request, timeout_s)
    if answer.cluster_id != session.cluster_id or answer.header.shard != link.index:
        raise WrongCluster(
            f"{link.peer} says it is shard {answer.header.shard} of cluster id {answer.cluster_id}, expected shard "
            f"{link.index} of {session.cluster_id}; two processes may share the address"
        )
    if not MIN_PROTOCOL_VERSION <= answer.protocol_version <= PROTOCOL_VERSION:
        raise VersionMismatch(
            f"{link.peer} wants protocol version {answer.protocol_version}, this client speaks {MIN_PROTOCOL_VERSION} to "
            f"{PROTOCOL_VERSION}; use matching shardam packages"
        )
    return answer
