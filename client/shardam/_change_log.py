"""Gives numbers to a client's changes and sees each through on every shard, several at a time.

A number ends on all shards in one way: applied, or closed where it was refused (PROTOCOL.md, section 4).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardam._changes import AnyChange
from shardam._contributions import Contribution
from shardam._lane import Lane
from shardam._session import Session
from shardam._shards import Shards
from shardam._waiting import StepWait

MAX_IN_FLIGHT = 8
"""Numbers without an outcome at a time; the protocol allows 32. Two or three hide the wire, and the rest a shard that pauses;
each keeps its gradients in memory. A member of a sync group has one: the next step begins when all know how this one ended."""


class ChangeLog:
    """The numbers of one client.

    Args:
        session: the client.
        noted: called with the lock held after each shard's answer to a change.

    Attributes:
        lock: guards the log, its lanes and its changes.
    """

    def __init__(self, session: Session, noted: Callable[[AnyChange], None]) -> None:
        self.lock = threading.RLock()
        self._noted = noted
        self._membership = session.membership
        self._max_in_flight = 1 if self._membership is not None and self._membership.options.is_sync else MAX_IN_FLIGHT
        self._last_number = 0
        self._closed = False
        self._unsettled: dict[int, AnyChange] = {}
        self._session = session
        with self.lock:
            session.when_moved(self._move)
            self._shards = session.shards
            self._lanes = self._new_lanes()

    # with the lock held

    @property
    def has_room(self) -> bool:
        """True: one more number may be sent without waiting for the oldest."""
        return not self._unsettled or self._last_number - next(iter(self._unsettled)) + 1 < self._max_in_flight

    @property
    def waits_for_members(self) -> bool:
        """True: something is under way, and no shard has anything to do before other members of the group have arrived."""
        return bool(self._unsettled) and all(change.waits_for_members for change in self._unsettled.values())

    def last_on_its_way(self) -> int:
        """Returns the last number, if all that has no outcome is on the shards' streams. 0: something has yet to be sent; or a
        sync group decides about it, and a shard answers when it is staged.
        """
        is_sync = self._membership is not None and self._membership.options.is_sync
        return 0 if is_sync or not all(lane.has_sent_all for lane in self._lanes) else self._last_number

    def enter(self, change: AnyChange) -> None:
        """Gives a change the next number, and its step, and sends its parts to all shards."""
        change.fit(self._shards.route_map)
        self._last_number = change.number = self._last_number + 1
        if self._membership is not None:
            self._membership.enter(change)
        self._unsettled[change.number] = change
        for lane in self._lanes:
            lane.add(change)

    def oldest_stall(self) -> tuple[float, Lane] | None:
        """Returns the lane whose shard has done nothing for the longest while something is expected of it, and since when."""
        stalls = [(since, lane) for lane in self._lanes if (since := lane.stalled_since()) is not None]
        return min(stalls, key=lambda stall: stall[0], default=None)

    def close(self) -> None:
        """Sends nothing more; what is not settled is forgotten."""
        self._closed = True
        self._unsettled.clear()
        for lane in self._lanes:
            lane.close()

    # to other shards

    def _new_lanes(self) -> list[Lane]:
        return [Lane(self._session, link, self.lock, self._note) for link in self._shards.links]

    def _move(self, shards: Shards, last_number: int) -> None:
        """Goes on with the shards of another route map; called by the session.

        Args:
            shards: they.
            last_number: up to this number changes are closed on all of them. Later ones are applied nowhere, and sent there.
        """
        with self.lock:
            if shards.epoch <= self._shards.epoch:
                return
            for lane in self._lanes:
                lane.close()
            self._shards = shards
            self._lanes = [] if self._closed else self._new_lanes()
            for change in self._unsettled.values():
                change.fit(shards.route_map, last_number)
                if not change.settled:
                    for lane in self._lanes:
                        lane.add(change)
            for change in [change for change in self._unsettled.values() if change.settled]:
                self._settle(change)
                self._noted(change)

    # answers

    def _note(self, change: AnyChange) -> None:
        for lane in self._lanes:
            lane.go_on()
        if self._membership is not None and isinstance(change, Contribution) and change.waits_for_members:
            self._say_wait(self._membership.wait, change)
        if change.settled:
            self._settle(change)
        self._noted(change)

    def _settle(self, change: AnyChange) -> None:
        del self._unsettled[change.number]
        if self._membership is not None:
            self._membership.settle(change)

    def _say_wait(self, wait: StepWait, change: Contribution) -> None:
        if change.missing:
            wait.note(change.step, change.missing, change.absent)
        else:
            wait.begin()
