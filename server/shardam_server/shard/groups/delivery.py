"""Home tells the other shards: a group's members and its last decision, again and again until each has confirmed.

A decision is in home's journal before it is told, and a shard that confirms has it in its own. A peer is at most one decision
behind: members cannot arrive at the next step before every shard has staged their parts of it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Protocol

from shardam_proto.errors import ShardamError, ShardNotReady
from shardam_proto.registry import ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.background import Background
from shardam_server.shard.context import ShardContext
from shardam_server.shard.groups.entries import GroupEntry
from shardam_server.shard.groups.messages import decode_refusal, encode_decision, encode_group
from shardam_server.shard.groups.values import Decision, Refusal
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peer_lanes import FIRST_WAIT_S, PeerLane

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 0.5
"""Longest wait between two tries on a shard that fails: all workers wait for the shard that is told."""


class GroupCalls(Protocol):
    """What delivery asks of other shards; `Peers` has it."""

    async def update_group(self, peer: ShardEntry, request: shard_pb2.UpdateGroupRequest) -> shard_pb2.UpdateGroupResponse:
        """Brings a group to where home has it, or raises ShardamError."""
        ...

    async def check_step(self, peer: ShardEntry, request: shard_pb2.CheckStepRequest) -> shard_pb2.CheckStepResponse:
        """Asks whether a step may be applied, or raises ShardamError."""
        ...


class Delivery:
    """Brings groups to the other shards. Used on the event loop of home.

    Args:
        shard: home.
        calls: calls the other shards.
        directory: knows where they are.
    """

    def __init__(self, shard: ShardContext, calls: GroupCalls, directory: PeerDirectory) -> None:
        self._shard = shard
        self._calls = calls
        self._directory = directory
        self._lanes: dict[int, PeerLane[str]] = {}
        self._background = Background()

    async def start(self) -> None:
        """Begins, with all groups: an earlier process life may have decided what it told nobody.

        Raises:
            ShardamError: the other shards' number is not known yet.
        """
        count = self._shard.identity.require_cluster().num_shards
        self._lanes = {index: self._lane(index) for index in range(1, count)}
        if self._lanes:
            await self._directory.refresh()
        for lane in self._lanes.values():
            self._background.start(lane.run())
        for entry in self._shard.state.groups:
            self.tell(entry.group.name)

    def _lane(self, index: int) -> PeerLane[str]:
        return PeerLane(
            index,
            functools.partial(self._update, index),
            self._directory.refresh,
            lambda name: f"group {name!r}",
            LONGEST_WAIT_S,
        )

    async def stop(self) -> None:
        """Ends; what is not confirmed is told again after the next start."""
        await self._background.stop()
        self._lanes = {}

    def tell(self, name: str) -> None:
        """Has a group, as it is now or later, told to all other shards."""
        for lane in self._lanes.values():
            lane.add(name)

    async def told(self, index: int) -> None:
        """Waits until a shard has confirmed all that there is to tell now."""
        lane = self._lanes.get(index)
        if lane is not None:
            await lane.idle.wait()

    async def told_all(self, wait_s: float) -> None:
        """Waits until every shard has confirmed all that there is to tell now.

        Raises:
            ShardNotReady: one has not in this time; it is told on.
        """
        try:
            async with asyncio.timeout(wait_s):
                for index in self._lanes:
                    await self.told(index)
        except TimeoutError:
            behind = [index for index, lane in self._lanes.items() if not lane.idle.is_set()]
            raise ShardNotReady(f"shards {behind} could not be told of the group within {wait_s:g} s; try again") from None

    async def former(self, name: str) -> tuple[int, int]:
        """Returns the highest version and step that other shards have of a group that home does not know.

        Raises:
            ShardamError: a shard does not answer; repeat it.
        """
        request = shard_pb2.UpdateGroupRequest()
        request.group.name = name
        try:
            answers = [await self._calls.update_group(self._directory.entry(index), request) for index in self._lanes]
        except ShardamError:
            await self._directory.refresh()  # for the next try
            raise
        return max((answer.version for answer in answers), default=0), max((answer.step for answer in answers), default=0)

    async def check(self, decision: Decision) -> Refusal | None:
        """Asks all other shards whether a step may be applied; waits for those that are away.

        Returns:
            Why it may not, by the first shard that says so.
        """
        request = shard_pb2.CheckStepRequest(decision=encode_decision(decision))
        for index in self._lanes:
            wait_s = FIRST_WAIT_S
            while True:
                try:
                    answer = await self._calls.check_step(self._directory.entry(index), request)
                    break
                except ShardamError as error:
                    logger.warning("step %d cannot be checked on shard %d yet: %s", decision.step, index, error.message)
                await asyncio.sleep(wait_s)
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
                await self._directory.refresh()
            if answer.HasField("refusal"):
                return decode_refusal(answer.refusal)
        return None

    async def _update(self, index: int, name: str) -> None:
        self._shard.tenure.check()  # another process may be home by now
        entry = self._shard.state.groups.find(name)
        if entry is None:
            return
        request = update_request(entry)
        answer = await self._calls.update_group(self._directory.entry(index), request)
        if answer.version < request.group.version or answer.step < request.step:
            raise ShardNotReady(f"shard {index} has group {name!r} at version {answer.version}, step {answer.step}")


def update_request(entry: GroupEntry) -> shard_pb2.UpdateGroupRequest:
    """Returns what brings a group on another shard to where it is here."""
    decision = None if entry.decision is None else encode_decision(entry.decision)
    return shard_pb2.UpdateGroupRequest(group=encode_group(entry.group), step=entry.step, decision=decision)
