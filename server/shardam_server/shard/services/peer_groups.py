"""The part of ShardService by which home brings groups of workers to the other shards."""

from __future__ import annotations

from shardam_proto.v1 import shard_pb2
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.changes import check_here, update_group
from shardam_server.shard.groups.messages import decode_decision, decode_group, encode_refusal
from shardam_server.shard.state import ShardState


async def update(shard: ShardContext, request: shard_pb2.UpdateGroupRequest) -> shard_pb2.UpdateGroupResponse:
    """Carries out a group's last decision, if this shard is one behind, and takes its members over.

    Without a version it changes nothing, and tells what this shard has: a home that starts empty asks so.

    Raises:
        ShardamError: the step cannot be carried out, or it cannot be recorded; home repeats the call.
    """
    shard.check_serving(request.header)
    await shard.change_now(lambda: update_here(shard.state, request))
    entry = shard.state.groups.find(request.group.name)
    return shard_pb2.UpdateGroupResponse(
        header=shard.header(request.header),
        version=0 if entry is None else entry.group.version,
        step=0 if entry is None else entry.step,
    )


async def check(shard: ShardContext, request: shard_pb2.CheckStepRequest) -> shard_pb2.CheckStepResponse:
    """Says whether a step's merged gradients may be applied here.

    Raises:
        ShardamError: as ShardContext.check_serving.
    """
    shard.check_serving(request.header)
    decision = decode_decision(request.decision)
    refusal = await shard.change_now(lambda: check_here(shard.state, decision))
    return shard_pb2.CheckStepResponse(header=shard.header(request.header), refusal=encode_refusal(refusal))


def update_here(state: ShardState, request: shard_pb2.UpdateGroupRequest) -> None:
    """Brings a group to where home has it; on the sequencer's thread.

    Raises:
        ShardamError: the step cannot be carried out, or it cannot be recorded.
    """
    if not request.group.version:
        return
    decision = decode_decision(request.decision) if request.HasField("decision") else None
    update_group(state, decode_group(request.group), request.step, decision)
