"""The part of ShardService that lists the workers of a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping

from shardam_proto.v1 import shard_pb2
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.clocks import clock_of
from shardam_server.shard.groups.home import HomeGroups
from shardam_server.shard.groups.messages import encode_terms
from shardam_server.shard.state import ShardState
from shardam_server.worker_words import worker_order


async def list_workers(
    shard: ShardContext, groups: HomeGroups, request: shard_pb2.ListWorkersRequest
) -> shard_pb2.ListWorkersResponse:
    """Lists clients that send heartbeats, groups' members first, and the groups that wait.

    Raises:
        WrongRole: this shard is not home.
        ShardamError: as ShardContext.check_serving.
    """
    shard.identity.require_home("workers are known to")
    shard.check_serving(request.header)
    found = await shard.sequencer.change(lambda: _workers(shard, groups))
    found.sort(key=worker_order)
    waiting = [
        shard_pb2.WaitingGroup(group=group.name, step=step, ranks=ranks, waited_s=waited_s)
        for group, step, ranks, waited_s in groups.waiting()
    ]
    return shard_pb2.ListWorkersResponse(header=shard.header(request.header), workers=found, waiting=waiting)


def _workers(shard: ShardContext, groups: HomeGroups) -> list[shard_pb2.Worker]:
    """Describes the workers; on the sequencer's thread."""
    state = shard.state
    furthest = {
        entry.group.name: max(clock_of(state, member) for member in entry.group.members)
        for entry in state.groups
        if entry.group.terms.mode == "bounded" and entry.group.members
    }
    return [
        _worker(state, groups, furthest, client_id, entry)
        for client_id, entry in state.clients
        if entry.heartbeats and not entry.closed
    ]


def _worker(
    state: ShardState, groups: HomeGroups, furthest: Mapping[str, int], client_id: bytes, entry: ClientEntry
) -> shard_pb2.Worker:
    """Describes one worker; furthest: name of a bounded group -> its highest clock."""
    worker = shard_pb2.Worker(
        client_id=client_id,
        last_heartbeat_s=time.monotonic() - entry.last_contact,
        last_number=entry.last_number,
    )
    found = state.groups.of_client(client_id)
    if found is None:
        return worker
    group, member = found[0].group, found[1]
    worker.group, worker.rank, worker.restart_count = group.name, member.rank, member.restart_count
    worker.terms.CopyFrom(encode_terms(group.terms))
    if group.terms.mode == "sync":
        worker.step = found[0].step
        worker.arrived = groups.has_arrived(group.name, client_id)
    else:
        worker.step = clock_of(state, member)
        worker.staleness = furthest[group.name] - worker.step
    return worker
