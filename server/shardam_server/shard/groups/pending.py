"""What home knows of the steps that are to be decided next: who has arrived, who waits. In memory alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Iterator

from shardam_server.shard.groups.arrivals import Arrival
from shardam_server.shard.groups.entries import GroupEntry


@dataclasses.dataclass
class PendingStep:
    """The next step of one sync group, as far as this process life knows.

    Attributes:
        step: the step; zero: nobody has arrived yet.
        arrivals: client id -> arrival.
        since: time.monotonic() of the first one; None: nobody has arrived.
        leaving: members that leave once the step is decided.
        changed: set, and replaced, when a step is decided or a member goes.
    """

    step: int = 0
    arrivals: dict[bytes, Arrival] = dataclasses.field(default_factory=dict)
    since: float | None = None
    leaving: set[bytes] = dataclasses.field(default_factory=set)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def note(self, step: int, arrival: Arrival) -> bool:
        """Notes an arrival at a step; True: it is news."""
        if step > self.step:
            self.step, self.arrivals, self.since = step, {}, None
        if step < self.step or self.arrivals.get(arrival.client_id) == arrival:
            return False
        self.arrivals[arrival.client_id] = arrival
        self.since = self.since or time.monotonic()
        return True

    def forget(self, client_ids: Iterable[bytes]) -> None:
        """Forgets arrivals, and has all who wait look again."""
        for client_id in client_ids:
            self.arrivals.pop(client_id, None)
        if not self.arrivals:
            self.since = None
        self.changed.set()
        self.changed = asyncio.Event()

    def pause(self, seconds: float) -> None:
        """Passes over a time in which nobody could arrive."""
        if self.since is not None:
            self.since = min(self.since + seconds, time.monotonic())

    def arrived_at(self, entry: GroupEntry) -> dict[bytes, Arrival]:
        """Returns the members that have arrived at a group's next step."""
        if self.step != entry.step + 1:
            return {}
        arrivals = dict(self.arrivals)
        return {one.client_id: arrivals[one.client_id] for one in entry.group.members if one.client_id in arrivals}


class PendingSteps:
    """The next steps of all groups. Used on the event loop."""

    def __init__(self) -> None:
        self._steps: dict[str, PendingStep] = {}

    def __iter__(self) -> Iterator[tuple[str, PendingStep]]:
        """Yields each group's name and next step."""
        return iter(list(self._steps.items()))

    def of(self, name: str) -> PendingStep:
        """Returns a group's next step."""
        return self._steps.setdefault(name, PendingStep())

    def clear(self) -> None:
        """Forgets all, and has all who wait look again."""
        steps, self._steps = self._steps, {}
        for step in steps.values():
            step.changed.set()
