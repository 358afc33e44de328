"""Who a shard is, and whether a request means it (PROTOCOL.md, section 2)."""

from __future__ import annotations

import dataclasses
import secrets

from shardam_proto.errors import (
    BadOption,
    ClusterRestored,
    ShardamError,
    ShardNotReady,
    StaleState,
    VersionMismatch,
    WrongCluster,
    WrongRole,
)
from shardam_proto.limits import CLIENT_ID_BYTES, MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2


def random_63_bits() -> int:
    """Returns a random number from 1 to 2**63 - 1; zero means "none" on the wire."""
    return secrets.randbelow(2**63 - 1) + 1


@dataclasses.dataclass
class ShardIdentity:
    """Who this shard is. Cluster and route map are known once it has registered.

    Attributes:
        index: shard index; 0 is home.
        incarnation: random number of this process life.
        lineage: lineage of its state; 0: not decided yet, or the state is lost.
        timeline: timeline of its state; grows with each restore.
        cluster: the cluster, once known.
        route_map: the route map, once made.
        plan: the plan that its state came from; None: it began empty.
    """

    index: int
    incarnation: int = dataclasses.field(default_factory=random_63_bits)
    lineage: int = dataclasses.field(default_factory=random_63_bits)
    timeline: int = 1
    cluster: ClusterEntry | None = None
    route_map: RouteMap | None = None
    plan: Plan | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the route map; zero: there is none yet."""
        return 0 if self.route_map is None else self.route_map.epoch

    def is_before(self, plan: Plan) -> bool:
        """True: this state is from before a plan."""
        return plan.is_ahead_of(self.timeline, self.epoch)

    @property
    def is_home(self) -> bool:
        """True for shard 0."""
        return self.index == 0

    def require_cluster(self) -> ClusterEntry:
        """Returns the cluster.

        Raises:
            ShardNotReady: the shard has not joined one yet.
        """
        if self.cluster is None:
            raise ShardNotReady(f"shard {self.index} has not joined its cluster yet; try again")
        return self.cluster

    def require_route_map(self) -> RouteMap:
        """Returns the route map.

        Raises:
            ShardNotReady: it has not been made yet.
        """
        if self.route_map is None:
            raise ShardNotReady(f"shard {self.index} waits for the route map; try again")
        return self.route_map

    def check(self, header: common_pb2.RequestHeader, *, chunks: bool = False) -> None:
        """Checks that a request means this process and speaks its protocol.

        Args:
            header: of the request.
            chunks: whether it may be one chunk of several.

        Raises:
            VersionMismatch: the protocol version is unknown.
            WrongCluster: it means another cluster.
            ClusterRestored: it belongs to a timeline before this one.
            ShardNotReady: it belongs to a later one, which this shard has yet to take over.
            StaleState: another incarnation or route epoch (retryable after a refresh).
            BadOption: its fields do not fit each other, or what is asked of this shard.
        """
        name = f"shard {self.index}"
        if not MIN_PROTOCOL_VERSION <= header.protocol_version <= PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{name} speaks protocol versions {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
                f"the request has {header.protocol_version}; use matching shardam packages"
            )
        if header.cluster_id and header.cluster_id != self.require_cluster().cluster_id:
            raise WrongCluster(
                f"{name} belongs to cluster id {self.require_cluster().cluster_id}, the request means {header.cluster_id}; "
                "connect again"
            )
        if header.incarnation and header.incarnation != self.incarnation:
            raise self._stale(
                "NEW_INCARNATION", f"{name} is incarnation {self.incarnation}, not {header.incarnation}; open again"
            )
        if header.timeline > self.timeline:
            raise ShardNotReady(f"{name} is on timeline {self.timeline}, the client on {header.timeline} already; try again")
        if header.timeline and header.timeline != self.timeline:
            raise ClusterRestored(f"{name} is on timeline {self.timeline}, the client on {header.timeline}; connect again")
        if header.epoch and header.epoch != self.require_route_map().epoch:
            raise self._stale(
                "STALE_ROUTE",
                f"{name} has route epoch {self.require_route_map().epoch}, the request {header.epoch}; refresh the map",
            )
        if not chunks and (header.num_chunks > 1 or header.chunk_index):
            raise BadOption(
                f"{name} takes chunks only of pushes on an Exchange stream, got chunk {header.chunk_index} of "
                f"{header.num_chunks}; send one message"
            )
        if header.rank and not header.step:
            raise BadOption(f"{name} got rank {header.rank} without a step; only members of a group have ranks")
        if header.client_id and len(header.client_id) != CLIENT_ID_BYTES:
            raise BadOption(f"client_id must be {CLIENT_ID_BYTES} bytes, got {len(header.client_id)}")

    def require_home(self, what: str) -> None:
        """Refuses what only home does.

        Args:
            what: says so, up to "the home shard".

        Raises:
            WrongRole: this shard is not home.
        """
        if not self.is_home:
            raise WrongRole(f"{what} the home shard, shard 0; this is shard {self.index}")

    def check_owns(self, owners_differ: bool, table: str) -> None:
        """Refuses ids that the route map gives to another shard.

        Raises:
            StaleState: at least one id belongs elsewhere (STALE_ROUTE).
        """
        if owners_differ:
            raise self._stale(
                "STALE_ROUTE",
                f"shard {self.index} does not own every id sent for table {table!r}; refresh the map and route again",
            )

    def _stale(self, reason: str, message: str) -> ShardamError:
        return StaleState(message, reason=reason, metadata={"shard": str(self.index)})

    def response_header(
        self, request: common_pb2.RequestHeader, *, last_number: int = 0, change_number: int = 0
    ) -> common_pb2.ResponseHeader:
        """Builds the header of the answer to a request."""
        return common_pb2.ResponseHeader(
            shard=self.index,
            incarnation=self.incarnation,
            lineage=self.lineage,
            timeline=self.timeline,
            epoch=self.epoch,
            request_id=request.request_id,
            last_number=last_number,
            change_number=change_number,
        )
