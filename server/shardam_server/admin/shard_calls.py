"""Calls of shards over gRPC: one channel per registered address, many shards at once, one more try after a refresh.

Every call here may be repeated safely: reads, the creation of tables, and numbered changes (change_clients.py).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import grpc

from shardam_proto.channels import open_channel, token_metadata, translate
from shardam_proto.errors import BadToken, ShardamError, ShardNotReady, ShardUnreachable, StaleState
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2
from shardam_proto.v1.checkpoint_pb2_grpc import CheckpointServiceStub
from shardam_proto.v1.embedding_pb2_grpc import EmbeddingServiceStub
from shardam_proto.v1.row_pb2_grpc import RowServiceStub
from shardam_proto.v1.shard_pb2_grpc import ShardServiceStub
from shardam_proto.v1.table_pb2_grpc import TableServiceStub
from shardam_server.admin.cluster import ClusterReader, Formed

STALE_VIEW_REASONS = frozenset({"SHARD_UNREACHABLE", "NOT_READY", "STALE_ROUTE", "WRONG_CLUSTER"})
"""Reasons after which Redis is read again: the shard may have moved or restarted."""


class HasHeader(Protocol):
    """A request of any service."""

    @property
    def header(self) -> common_pb2.RequestHeader:
        """Stands first in every request."""
        ...


T = TypeVar("T")
Request = TypeVar("Request", bound=HasHeader)
Response = TypeVar("Response")


@dataclasses.dataclass(frozen=True)
class Stubs:
    """The services of one shard process.

    Attributes:
        entry: the process as registered; another address or incarnation gets another channel.
        channel: the channel that the stubs use.
        embedding: clients and their numbers.
        rows: rows.
        tables: tables.
        shard: status and metrics.
        checkpoints: checkpoints and jobs; of home alone.
    """

    entry: ShardEntry
    channel: grpc.Channel
    embedding: EmbeddingServiceStub
    rows: RowServiceStub
    tables: TableServiceStub
    shard: ShardServiceStub
    checkpoints: CheckpointServiceStub


Select = Callable[[Stubs], "grpc.UnaryUnaryMultiCallable[Request, Response]"]


ADMIN_TOKEN_REFUSED = (
    "the shards refuse the admin API's own token, not the caller's: start `shardam admin` with the SHARDAM_TOKEN that "
    "they were started with"
)
"""What is said when shards refuse the token of this process: the caller's own was found right before the call."""


class ShardCalls:
    """Calls shards of the cluster that a reader knows.

    Args:
        reader: says who is registered where.
        token: the cluster's token, or None.
        timeout_s: deadline of a call.
        token_refused: what is said when shards refuse that token; None: their own words.
    """

    def __init__(
        self, reader: ClusterReader, token: str | None, timeout_s: float, *, token_refused: str | None = ADMIN_TOKEN_REFUSED
    ) -> None:
        self.reader = reader
        self.timeout_s = timeout_s
        self._token_refused = token_refused
        self._token = token
        self._lock = threading.Lock()
        self._stubs: dict[int, Stubs] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """True: no call will be made any more, so trying again is in vain."""
        return self._closed

    def by_route_map(self, work: Callable[[RouteMap], T]) -> T:
        """Does what calls shards with a route map's epoch; once more if another map takes its place meanwhile.

        Raises:
            ShardamError: as call_each, and what work raises.
        """
        route_map = self.reader.formed().route_map
        try:
            return work(route_map)
        except StaleState as error:
            present = self.reader.formed().route_map
            if error.reason != "STALE_ROUTE" or present == route_map:
                raise
        return work(present)

    def call(
        self,
        shard: int,
        select: Select[Request, Response],
        request: Request,
        request_id: int,
        timeout_s: float | None = None,
        *,
        epoch: int = 0,
    ) -> Response:
        """Calls one shard.

        Args:
            shard: its index.
            select: picks the stub method.
            request: the request.
            request_id: travels in the header, so that the shard's log names it.
            timeout_s: as call_many.
            epoch: as call_each.

        Raises:
            ShardamError: the shard's reason, or SHARD_UNREACHABLE or NOT_READY.
        """
        outcome = self.call_many({shard: request}, select, request_id, timeout_s, epoch=epoch)[shard]
        if isinstance(outcome, ShardamError):
            raise outcome
        return outcome

    def call_many(
        self,
        requests: Mapping[int, Request],
        select: Select[Request, Response],
        request_id: int,
        timeout_s: float | None = None,
        *,
        epoch: int = 0,
    ) -> dict[int, Response | ShardamError]:
        """Calls several shards at once and waits for all of them.

        Args:
            requests: request by shard index; see call_each for their headers.
            select: picks the stub method.
            request_id: travels in the header, so that the shards' logs name it.
            timeout_s: deadline of each call; None: the one given to the constructor.
            epoch: as call_each.

        Returns:
            The answer or the error of each shard.

        Raises:
            ShardNotReady: the cluster has not formed yet.
            RedisUnreachable: nothing is known of the cluster.
            ShardUnreachable: this process ends.
        """
        outcomes = self.call_each(list(requests.items()), select, request_id, timeout_s, epoch=epoch)
        return dict(zip(requests, outcomes, strict=True))

    def call_each(
        self,
        requests: Sequence[tuple[int, Request]],
        select: Select[Request, Response],
        request_id: int,
        timeout_s: float | None = None,
        *,
        epoch: int = 0,
    ) -> list[Response | ShardamError]:
        """Makes any number of calls at once, several to one shard too, and waits for all of them.

        Args:
            requests: shard index and request. Protocol version, cluster, epoch and request id are put into their headers here;
                what else stands in them (client, number, incarnation) stays.
            select: as call_many.
            request_id: as call_many.
            timeout_s: as call_many.
            epoch: epoch of the route map by which the caller chose the shards, so that those of another one answer nothing.
                Zero: any map will do.

        Returns:
            The answers or errors in the order of the requests.

        Raises:
            StaleState: there is another map now (STALE_ROUTE).
            ShardNotReady, RedisUnreachable, ShardUnreachable: as call_many.
        """
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        started = self.reader.now()
        formed = self.reader.formed()
        if epoch not in (0, formed.route_map.epoch):
            raise StaleState(
                f"cluster {self.reader.cluster!r} has moved to {formed.route_map.num_shards} shards; send the request again",
                reason="STALE_ROUTE",
            )
        outcomes = self._attempt(formed, requests, select, request_id, deadline_s)
        stale = [place for place, outcome in enumerate(outcomes) if _is_stale(outcome)]
        if stale:
            view = self.reader.refresh(started)
            if epoch and view.route_map != formed.route_map:
                return outcomes
            moved = [place for place in stale if _differs(formed, view, requests[place][0])]
            if moved:
                again = [requests[place] for place in moved]
                second = self._attempt(self.reader.require_formed(view), again, select, request_id, deadline_s)
                for place, outcome in zip(moved, second, strict=True):
                    outcomes[place] = outcome
        return outcomes

    def close(self) -> None:
        """Ends the calls under way and refuses others, so that no request outlives the time allowed for the end."""
        with self._lock:
            self._closed = True
            for stubs in self._stubs.values():
                stubs.channel.close()
            self._stubs.clear()

    def _attempt(
        self,
        formed: Formed,
        requests: Sequence[tuple[int, Request]],
        select: Select[Request, Response],
        request_id: int,
        timeout_s: float,
    ) -> list[Response | ShardamError]:
        calls: list[tuple[int, grpc.Future[Response] | None]] = []
        for shard, request in requests:
            entry = formed.shards.get(shard)
            if entry is None:
                calls.append((shard, None))
                continue
            request.header.MergeFrom(self._header(formed, request_id))
            method = select(self._stubs_of(entry))
            calls.append((shard, method.future(request, timeout=timeout_s, metadata=token_metadata(self._token))))
        outcomes: list[Response | ShardamError] = []
        for shard, future in calls:
            if future is None:
                outcomes.append(_not_registered(self.reader.cluster, shard))
                continue
            peer = f"shard {shard} at {formed.shards[shard].address}"
            try:
                outcomes.append(future.result())
            except grpc.RpcError as error:
                outcomes.append(self._name_own_token(translate(error, peer)))
            except grpc.FutureCancelledError as error:  # grpc's word for a call that the shard or close() ended
                message = f"{peer} ended the call ({error}); send it again"
                outcomes.append(ShardUnreachable(message, metadata={"shard": str(shard)}))
        return outcomes

    def _name_own_token(self, error: ShardamError) -> ShardamError:
        if error.reason != "BAD_TOKEN" or self._token_refused is None:
            return error
        return BadToken(self._token_refused, metadata=error.metadata)

    def _header(self, formed: Formed, request_id: int) -> common_pb2.RequestHeader:
        return common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=formed.entry.cluster_id,
            epoch=formed.route_map.epoch,
            request_id=request_id,
        )

    def _stubs_of(self, entry: ShardEntry) -> Stubs:
        with self._lock:
            if self._closed:
                raise ShardUnreachable("the admin API ends; send the request to another one, or again once it has started")
            known = self._stubs.get(entry.index)
            if known is not None and known.entry.address == entry.address and known.entry.incarnation == entry.incarnation:
                return known
            # The former channel is dropped, not closed: calls of other threads may still use it.
            channel = open_channel(entry.address)
            stubs = Stubs(
                entry,
                channel,
                EmbeddingServiceStub(channel),
                RowServiceStub(channel),
                TableServiceStub(channel),
                ShardServiceStub(channel),
                CheckpointServiceStub(channel),
            )
            self._stubs[entry.index] = stubs
            return stubs


def _is_stale(outcome: object) -> bool:
    return isinstance(outcome, ShardamError) and outcome.reason in STALE_VIEW_REASONS


def _differs(old: Formed, new: ClusterView, shard: int) -> bool:
    """True: another try at this shard can have another outcome."""
    if new.entry is None or new.route_map is None or shard not in new.shards:
        return False
    return old.shards.get(shard) != new.shards[shard] or old.route_map != new.route_map or old.entry != new.entry


def _not_registered(cluster: str, shard: int) -> ShardNotReady:
    return ShardNotReady(
        f"shard {shard} of cluster {cluster!r} is not registered: it starts, or it has stopped; "
        f"start it with `shardam shard --index {shard}`",
        metadata={"cluster": cluster, "shard": str(shard)},
    )
