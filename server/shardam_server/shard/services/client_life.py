"""The part of EmbeddingService by which clients stay alive and leave."""

from __future__ import annotations

from shardam_proto.errors import ShardNotReady
from shardam_proto.v1 import embedding_pb2, shard_pb2
from shardam_server.shard.client_closing import LEAVE_WAIT_S, ClientClosing
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.home import HomeGroups


async def hear(shard: ShardContext, request: embedding_pb2.HeartbeatRequest) -> embedding_pb2.HeartbeatResponse:
    """Answers a client's sign of life; it was noted when the request was checked.

    Raises:
        WrongRole: this shard is not home.
        ClientClosed: the client is unknown, or has left or was dropped.
        ShardamError: as ShardContext.check_serving.
    """
    shard.identity.require_home("clients send heartbeats to")
    shard.check_serving(request.header)
    entry = await shard.sequencer.change(lambda: shard.state.clients.get(request.header.client_id))
    return embedding_pb2.HeartbeatResponse(header=shard.header(request.header, entry.last_number))


async def leave(
    shard: ShardContext, closing: ClientClosing, groups: HomeGroups, request: embedding_pb2.LeaveRequest
) -> embedding_pb2.LeaveResponse:
    """Ends a client: on home on all shards, elsewhere on this one. Allowed while draining, so that workers can say goodbye.

    Raises:
        ShardNotReady: the shard does not know its clients yet.
        ShardamError: as ShardIdentity.check, or the journal's.
    """
    if shard.identity.cluster is None or shard.serving == shard_pb2.SERVING_STATE_STARTING:
        raise ShardNotReady(f"shard {shard.identity.index} is starting and does not know its clients yet; try again")
    shard.identity.check(request.header)
    client_id = request.header.client_id
    if shard.identity.is_home and groups.leaves_later(client_id):
        pass  # it is closed once the step that it has arrived at is decided
    elif shard.identity.is_home:
        await closing.close(client_id, wait_s=LEAVE_WAIT_S)
    else:
        await shard.change(lambda: shard.state.end_client(client_id))
    return embedding_pb2.LeaveResponse(header=shard.header(request.header))
