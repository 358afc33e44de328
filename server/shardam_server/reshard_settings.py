"""Settings of `shardam reshard`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardam_proto.routing import NUM_BUCKETS
from shardam_server.setting_types import TimeoutSeconds
from shardam_server.settings import MemberSettings


class ReshardSettings(MemberSettings):
    """Settings of `shardam reshard`."""

    shards: int = Field(ge=1, le=NUM_BUCKETS, description="number of shards that the rows move to. Required")
    wait: bool = Field(
        True,
        description="wait until the new shards serve, and say how far it is; without it the command ends once it has begun",
    )
    wait_s: Annotated[float, Field(ge=0, le=7 * 86_400)] = Field(
        0.0, description="seconds after which the command waits no longer, while the move goes on; 0 = as long as it takes"
    )
    shard_timeout_s: TimeoutSeconds = Field(5.0, description="seconds until a call to a shard has failed")
