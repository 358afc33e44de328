"""What the fronts of a shard share."""

from __future__ import annotations

import dataclasses
import os
import time

from shardam_proto.errors import ShardNotReady
from shardam_proto.v1 import common_pb2, shard_pb2
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.records import Device
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.state import ShardState


@dataclasses.dataclass
class ShardContext:
    """One shard process.

    Attributes:
        identity: who it is.
        state: tables and clients.
        sequencer: the order of changes.
        metrics: counters.
        device: device that holds the rows.
        serving: whether it serves.
        waiting_for: what it waits for while starting.
        address: registered gRPC address.
        http_address: address of the metrics and health listener.
        lost_rows: it started empty where the cluster had rows before.
        pid: process id on its host.
        started: time.monotonic() at start.
    """

    identity: ShardIdentity
    state: ShardState
    sequencer: Sequencer
    metrics: ShardMetrics
    device: Device
    serving: shard_pb2.ServingState.ValueType = shard_pb2.SERVING_STATE_STARTING
    waiting_for: str = ""
    address: str = ""
    http_address: str = ""
    lost_rows: bool = False
    pid: int = dataclasses.field(default_factory=os.getpid)
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_serving(self) -> bool:
        """True once it serves and until it drains."""
        return self.serving == shard_pb2.SERVING_STATE_SERVING

    def check_serving(self, header: common_pb2.RequestHeader) -> None:
        """Checks that the shard serves and that a request means it.

        Raises:
            ShardNotReady: starting or draining (retryable).
            ShardamError: as ShardIdentity.check.
        """
        if not self.is_serving:
            state = shard_pb2.ServingState.Name(self.serving).removeprefix("SERVING_STATE_").lower()
            reason = f", waits for {self.waiting_for}" if self.waiting_for else ""
            raise ShardNotReady(
                f"shard {self.identity.index} is {state}{reason}; try again", metadata={"shard": str(self.identity.index)}
            )
        self.identity.check(header)

    def header(self, request: common_pb2.RequestHeader, last_number: int = 0) -> common_pb2.ResponseHeader:
        """Builds the header of the answer to a request."""
        return self.identity.response_header(request, last_number=last_number, change_number=self.state.change_number)
