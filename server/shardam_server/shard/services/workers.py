"""The part of ShardService that lists the workers of a cluster."""

from __future__ import annotations

import time

from shardam_proto.errors import WrongRole
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.groups.messages import encode_terms


async def list_workers(
    shard: ShardContext, groups: HomeGroups, request: shard_pb2.ListWorkersRequest
) -> shard_pb2.ListWorkersResponse:
    """Lists clients that send heartbeats, groups' members first, and the groups that wait.

    Raises:
        WrongRole: this shard is not home.
        ShardamError: as ShardContext.check_serving.
    """
    if not shard.identity.is_home:
        raise WrongRole(f"the home shard, shard 0, knows the workers; this is shard {shard.identity.index}")
    shard.check_serving(request.header)
    found = await shard.sequencer.change(lambda: _workers(shard, groups))
    found.sort(key=lambda worker: (not worker.group, worker.group, worker.rank, worker.client_id))
    waiting = [
        shard_pb2.WaitingGroup(group=group.name, step=step, ranks=ranks, waited_s=waited_s)
        for group, step, ranks, waited_s in groups.waiting()
    ]
    return shard_pb2.ListWorkersResponse(header=shard.header(request.header), workers=found, waiting=waiting)


def _workers(shard: ShardContext, groups: HomeGroups) -> list[shard_pb2.Worker]:
    """Describes the workers; on the sequencer's thread."""
    clients = shard.state.clients
    return [_worker(shard, groups, client_id, entry) for client_id, entry in clients if entry.heartbeats and not entry.closed]


def _worker(shard: ShardContext, groups: HomeGroups, client_id: bytes, entry: ClientEntry) -> shard_pb2.Worker:
    worker = shard_pb2.Worker(
        client_id=client_id,
        last_heartbeat_s=time.monotonic() - entry.last_contact,
        last_number=entry.last_number,
    )
    found = shard.state.groups.of_client(client_id)
    if found is None:
        return worker
    group, member = found[0].group, found[1]
    worker.group, worker.rank, worker.restart_count = group.name, member.rank, member.restart_count
    worker.terms.CopyFrom(encode_terms(group.terms))
    if group.terms.mode == "sync":
        worker.step = found[0].step
        worker.arrived = groups.has_arrived(group.name, client_id)
    else:
        clocks = groups.clocks(group)
        worker.step = clocks[client_id]
        worker.staleness = max(clocks.values()) - clocks[client_id]
    return worker
