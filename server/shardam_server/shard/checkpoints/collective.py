"""Members of a group ask for a checkpoint together, each after the same step (PROTOCOL.md, section 8)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from shardam_proto.errors import BadOption, StepTimeout
from shardam_server.shard.checkpoints.jobs import Job
from shardam_server.shard.groups.entries import Groups
from shardam_server.shard.groups.values import Group

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Members are looked at this often while some have not asked: one may be dropped meanwhile."""


@dataclasses.dataclass
class Gathering:
    """Members that have asked for one checkpoint.

    Attributes:
        job: the job that will make it.
        name: the name that was asked for; empty: none.
        step: the step after which they ask.
        asked: client id -> (rank, id of its addition or nothing).
        since: time.monotonic() when the first one asked.
    """

    job: Job
    name: str
    step: int
    asked: dict[bytes, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    since: float = dataclasses.field(default_factory=time.monotonic)

    def add(self, client_id: bytes, rank: int, step: int, name: str, extra_id: bytes) -> None:
        """Notes that a member has asked; a repeat is passed over.

        Raises:
            BadOption: it asks after another step, or under another name, than the others.
        """
        if (step, name) != (self.step, self.name) and client_id not in self.asked:
            others = ", ".join(str(known) for known, _ in self.asked.values())
            raise BadOption(
                f"rank {rank} asks for a checkpoint {_words(step, name)}, ranks {others} for one "
                f"{_words(self.step, self.name)}; all members of a group ask after the same step"
            )
        self.asked[client_id] = rank, extra_id

    @property
    def additions(self) -> dict[int, bytes]:
        """Rank -> id of its addition."""
        return {rank: extra_id for rank, extra_id in self.asked.values() if extra_id}

    def missing(self, group: Group) -> list[int]:
        """Returns ranks of members that have not asked."""
        return [member.rank for member in group.members if member.client_id not in self.asked]

    async def complete(self, groups: Groups, name: str, timeout_s: float) -> None:
        """Waits until all members have asked.

        Args:
            groups: the groups of home.
            name: the group's name.
            timeout_s: how long to wait.

        Raises:
            StepTimeout: a member has not asked in time; the message names it.
        """
        while True:
            entry = groups.find(name)
            missing = [] if entry is None else self.missing(entry.group)
            if not missing:
                return
            self.job.phase = f"waits for ranks {missing} of group {name!r} to ask, too"
            if time.monotonic() - self.since > timeout_s:
                raise StepTimeout(
                    f"ranks {missing} of group {name!r} did not ask for a checkpoint within {timeout_s:g} s: in a group every "
                    "member calls checkpoint() after the same step",
                    metadata={"missing_ranks": ",".join(map(str, missing))},
                )
            await asyncio.sleep(LOOK_S)


def _words(step: int, name: str) -> str:
    return f"after step {step}" + (f" named {name!r}" if name else "")
