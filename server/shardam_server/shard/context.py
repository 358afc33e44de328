"""What the fronts of a shard share."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from typing import TypeVar

from shardam_proto.errors import ShardLost, ShardNotReady
from shardam_proto.registry import lost_shard_problem
from shardam_proto.v1 import common_pb2, shard_pb2
from shardam_server.shard.checkpoints.tasks import Tasks
from shardam_server.shard.groups.waits import StepWaits
from shardam_server.shard.holding import Holding, Mark
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.kept_state import KeptState
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.records import Device
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.state import ShardState
from shardam_server.shard.streams import Streams
from shardam_server.shard.tenure import Tenure

T = TypeVar("T")

CLIENT_LEASE_S = 30.0
"""Silence after which home closes a client, unless the settings say otherwise: some missed heartbeats, not a busy moment."""


@dataclasses.dataclass
class ShardContext:
    """One shard process.

    Attributes:
        identity: who it is.
        state: tables and clients.
        sequencer: the order of changes.
        metrics: counters.
        device: device that holds the rows.
        tenure: its right to act as this shard.
        kept: its state on disk.
        client_lease_s: silence in seconds after which home closes a client.
        streams: what its open streams share.
        serving: whether it serves, as far as its life cycle goes; `serving_state` has the last word.
        waiting_for: what it waits for while starting or LOST.
        lost_because: why it is LOST and what to do, unless it has no state at all.
        address: registered gRPC address.
        http_address: address of the metrics and health listener.
        pid: process id on its host.
        started: time.monotonic() at start.
        waits: requests of groups' members that wait.
        holding: holds changes back while a checkpoint is cut.
        tasks: work for checkpoints that goes on beside changes.
    """

    identity: ShardIdentity
    state: ShardState
    sequencer: Sequencer
    metrics: ShardMetrics
    device: Device
    tenure: Tenure
    kept: KeptState = dataclasses.field(default_factory=KeptState)
    client_lease_s: float = CLIENT_LEASE_S
    streams: Streams = dataclasses.field(default_factory=Streams)
    serving: shard_pb2.ServingState.ValueType = shard_pb2.SERVING_STATE_STARTING
    waiting_for: str = ""
    lost_because: str = ""
    address: str = ""
    http_address: str = ""
    pid: int = dataclasses.field(default_factory=os.getpid)
    started: float = dataclasses.field(default_factory=time.monotonic)
    waits: StepWaits = dataclasses.field(init=False)
    holding: Holding = dataclasses.field(init=False)
    tasks: Tasks = dataclasses.field(default_factory=Tasks)

    def __post_init__(self) -> None:
        """Has requests wait for what happens to this state."""
        self.waits = StepWaits(lambda: self.state, self.metrics)
        self.holding = Holding(self.sequencer.count_held)

    @property
    def lost_message(self) -> str:
        """What a LOST shard answers."""
        return self.lost_because or lost_shard_problem(self.identity.index)

    def submit(self, apply: Callable[[], T], num_bytes: int = 0, mark: Mark | None = None) -> asyncio.Future[T]:
        """Puts a change behind all that came before it; it runs whatever becomes of the future, which is for `settle`.

        While changes are held back it waits for its release first.

        The future raises ShardNotReady where the shard overslept its lease or its state was replaced, ShardLost where it has
        not the state that the change is meant for, and what apply raises; nothing was changed then.

        Args:
            apply: the change.
            num_bytes: what it holds in memory until it has run.
            mark: its client and number, if it has one.
        """
        state = self.state
        return self.holding.run(lambda: self._submit(apply, num_bytes, state), mark, num_bytes)

    def submit_now(self, apply: Callable[[], T], num_bytes: int = 0) -> asyncio.Future[T]:
        """Submits what a hold does not stop: it changes nothing that a cut has, or brings this shard to where others are."""
        state = self.state
        return self.holding.run_now(lambda: self._submit(apply, num_bytes, state), num_bytes)

    def _submit(self, apply: Callable[[], T], num_bytes: int, state: ShardState) -> asyncio.Future[T]:
        def guarded() -> T:
            self.tenure.check()  # time may have passed in the queue
            self.check_not_lost()
            self.check_state(state)
            state.check_whole()
            return apply()

        applied = self.sequencer.submit(guarded, num_bytes)
        applied.add_done_callback(lambda _: self.waits.notice())
        return applied

    async def settle(self, applied: asyncio.Future[T]) -> T:
        """Waits until a submitted change is applied and as safe as the journal promises, and returns its result.

        Raises:
            ShardamError: as submit, and what the journal raises.
        """
        result = await asyncio.shield(applied)
        await self.state.journal.durable()
        return result

    async def change(self, apply: Callable[[], T], num_bytes: int = 0, mark: Mark | None = None) -> T:
        """Submits a change and settles it.

        Raises:
            ShardamError: as settle.
        """
        return await self.settle(self.submit(apply, num_bytes, mark))

    async def change_now(self, apply: Callable[[], T]) -> T:
        """Submits what a hold does not stop, and settles it.

        Raises:
            ShardamError: as settle.
        """
        return await self.settle(self.submit_now(apply))

    @property
    def serving_state(self) -> shard_pb2.ServingState.ValueType:
        """Whether it serves now."""
        if self.serving == shard_pb2.SERVING_STATE_SERVING and (self.tenure.suspended or self.tenure.fenced):
            return shard_pb2.SERVING_STATE_SUSPENDED
        return self.serving

    @property
    def is_serving(self) -> bool:
        """True once it serves and until it drains, but for pauses beyond its lease."""
        return self.serving_state == shard_pb2.SERVING_STATE_SERVING

    def check_not_lost(self) -> None:
        """Refuses to act without the state that the cluster knows for this shard.

        Raises:
            ShardLost: it is LOST.
        """
        if self.serving == shard_pb2.SERVING_STATE_LOST:
            raise ShardLost(self.lost_message, metadata={"shard": str(self.identity.index)})

    def check_state(self, state: ShardState) -> None:
        """Refuses what was meant for a state that another one has replaced.

        Raises:
            ShardNotReady: it was replaced (retryable: it is then refused for good, as of a former timeline).
        """
        if self.state is not state:
            raise ShardNotReady(
                f"shard {self.identity.index} takes a checkpoint over; try again", metadata={"shard": str(self.identity.index)}
            )

    def check_serving(self, header: common_pb2.RequestHeader, *, chunks: bool = False) -> None:
        """Checks that the shard serves and that a request means it; notes contact with the client, whatever comes of it.

        Args:
            header: of the request.
            chunks: whether it may be one chunk of several.

        Raises:
            ShardNotReady: starting, draining, or suspended until its name is confirmed (retryable).
            ShardLost: its rows are lost.
            JournalFailed: memory may hold a change in part; it is about to end.
            ShardamError: as ShardIdentity.check.
        """
        self.state.clients.touch(header.client_id)
        self.check_not_lost()
        self.state.check_whole()
        self.tenure.check()
        if not self.is_serving:
            state = shard_pb2.ServingState.Name(self.serving).removeprefix("SERVING_STATE_").lower()
            reason = f", waits for {self.waiting_for}" if self.waiting_for else ""
            raise ShardNotReady(
                f"shard {self.identity.index} is {state}{reason}; try again", metadata={"shard": str(self.identity.index)}
            )
        self.identity.check(header, chunks=chunks)

    def header(self, request: common_pb2.RequestHeader, last_number: int = 0) -> common_pb2.ResponseHeader:
        """Builds the header of the answer to a request."""
        return self.identity.response_header(request, last_number=last_number, change_number=self.state.change_number)
