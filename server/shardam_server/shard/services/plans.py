"""What a shard does when home tells it of a plan (PROTOCOL.md, section 8)."""

from __future__ import annotations

from shardam_proto.errors import BadOption
from shardam_proto.registry import Plan
from shardam_proto.v1 import cut_pb2
from shardam_server.shard.checkpoints.adoption import Adoption
from shardam_server.shard.context import ShardContext


async def adopt(shard: ShardContext, adoption: Adoption, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
    """Begins to take a plan over; also while the shard starts or is LOST. One that it has, or an older one, is passed over.

    Raises:
        BadOption: it is no plan.
        ShardamError: the request does not mean this process.
    """
    shard.identity.require_cluster()
    shard.identity.check(request.header)
    try:
        plan = Plan.from_json(request.plan)
    except (ValueError, TypeError, KeyError) as error:
        raise BadOption(f"the plan cannot be read ({error}); use matching shardam packages on all shards") from error
    adoption.notice(plan)
    return cut_pb2.AdoptPlanResponse(header=shard.header(request.header))
