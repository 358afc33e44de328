"""Members of a group as processes: started with a rank, watched through their progress files, killed and stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from shardam_testing.faults.workers import Launch, WorkerProcess
from shardam_testing.waiting import wait_for

STEP_TIMEOUT_S = 100.0
"""A step takes milliseconds; a member waits seconds for shards that start again."""


class Ended(NamedTuple):
    """How a step ended for a member.

    Attributes:
        step: the step; bounded: its clock.
        end: "applied", "abstained", or "refused".
        counted: contributions that were counted (K); 0: not known, as of a step that was refused or is bounded.
        at_s: time.monotonic() then.
    """

    step: int
    end: str
    counted: int
    at_s: float


class Moment(NamedTuple):
    """When a member did something for a step, by time.monotonic(), which is one clock for the processes of a machine."""

    step: int
    at_s: float


@dataclasses.dataclass
class Life:
    """One client of a member.

    Attributes:
        client_id: the client.
        first_step: the first step that it takes part in; bounded: the clock it joined with, plus 1.
        sent: steps handed to the client.
        ended: steps acknowledged.
        pulled: step -> digest of what was pulled for it.
        pulls: when the pulls of training were answered.
        dropped: reason of the error that told it that it is no member; empty: none has.
    """

    client_id: bytes
    first_step: int
    sent: list[Moment] = dataclasses.field(default_factory=list)
    ended: list[Ended] = dataclasses.field(default_factory=list)
    pulled: dict[int, str] = dataclasses.field(default_factory=dict)
    pulls: list[Moment] = dataclasses.field(default_factory=list)
    dropped: str = ""


@dataclasses.dataclass
class MemberNoted:
    """What a member has noted so far.

    Attributes:
        lives: its clients, the first one first; another one after each time that it joined again.
        error: the line of the error that ended it; empty: none.
        done: it has been through its last step and left.
    """

    lives: list[Life] = dataclasses.field(default_factory=list)
    error: dict[str, str] = dataclasses.field(default_factory=dict)
    done: bool = False

    @property
    def last_step(self) -> int:
        """The last step acknowledged; 0: none yet."""
        return max((ended.step for life in self.lives for ended in life.ended), default=0)

    @property
    def ended(self) -> list[Ended]:
        """All steps acknowledged, of all clients."""
        return [ended for life in self.lives for ended in life.ended]

    def take(self, line: Mapping[str, int | float | str]) -> None:
        """Takes one line."""
        match dict(line):
            case {"client": str(text), "first_step": int(step)}:
                self.lives.append(Life(bytes.fromhex(text), step))
            case {"pulled": str(digest), "step": int(step), "at": float(at_s)}:
                self.lives[-1].pulled[step] = digest
                self.lives[-1].pulls.append(Moment(step, at_s))
            case {"sent": int(step), "at": float(at_s)}:
                self.lives[-1].sent.append(Moment(step, at_s))
            case {"ended": str(end), "step": int(step), "counted": int(counted), "at": float(at_s)}:
                self.lives[-1].ended.append(Ended(step, end, counted, at_s))
            case {"dropped": str(reason)}:
                self.lives[-1].dropped = reason
            case {"error": _}:
                self.error = {name: str(value) for name, value in line.items()}
            case {"done": _}:
                self.done = True


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """What the members of a group have in common.

    Attributes:
        seed: of the run.
        world_size: number of ranks.
        last_step: the step after which a member leaves.
        mode: as connect takes it.
        group: the group's name.
        reduce: as connect takes it.
        pace_s: rest before each step.
        skip: steps of the run that an earlier group has made.
    """

    seed: int
    world_size: int
    last_step: int
    mode: str = "sync"
    group: str = "workers"
    reduce: str = "mean"
    pace_s: float = 0.0
    skip: int = 0


@dataclasses.dataclass
class Member(WorkerProcess):
    """One member's process.

    Attributes:
        plan: what it has in common with the others.
        rank: its rank.
        restart_count: how often its launcher has started its rank again.
    """

    plan: GroupPlan = dataclasses.field(kw_only=True)
    rank: int = dataclasses.field(kw_only=True)
    restart_count: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._noted = MemberNoted()

    @property
    def noted(self) -> MemberNoted:
        """What it has noted so far."""
        for line in self.new_lines():
            self._noted.take(line)
        return self._noted

    def wait_step(self, step: int, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Waits until a step has been acknowledged.

        Raises:
            AssertionError: the member ended before, or it took too long.
        """

        def reached() -> bool:
            noted = self.noted
            assert self.alive or noted.last_step >= step, f"{self.name} ended: {noted.error}\n{self.log_text()}"
            return noted.last_step >= step

        wait_for(f"{self.name} to be through step {step}", reached, timeout_s)

    def wait_joined(self, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Waits until it has joined its group.

        Raises:
            AssertionError: it ended before, or it took too long.
        """

        def joined() -> bool:
            assert self.alive or self.noted.lives, f"{self.name} ended: {self.noted.error}\n{self.log_text()}"
            return bool(self.noted.lives)

        wait_for(f"{self.name} to join", joined, timeout_s)


@dataclasses.dataclass
class Members:
    """The members of one cluster's groups. A context manager's job is its owner's: call `close`.

    Args:
        launch: how they are started.
    """

    launch: Launch
    started: list[Member] = dataclasses.field(default_factory=list)

    def start(self, plan: GroupPlan, rank: int, *, restart_count: int = 0, **changes: object) -> Member:
        """Starts a member; changes are those of the plan's values that this one alone has."""
        name = f"member {len(self.started)} (rank {rank})"
        options = {**dataclasses.asdict(plan), "rank": rank, **changes}
        launched = self.launch.start(
            "group_worker", f"member {len(self.started)}", options, TORCHELASTIC_RESTART_COUNT=str(restart_count)
        )
        member = Member(name, plan.seed, *launched, plan=plan, rank=rank, restart_count=restart_count)
        self.started.append(member)
        return member

    def start_again(self, member: Member) -> Member:
        """Starts a rank again, as its launcher does: with one more restart counted."""
        return self.start(member.plan, member.rank, restart_count=member.restart_count + 1)

    def start_all(self, plan: GroupPlan) -> list[Member]:
        """Starts a member for each rank."""
        return [self.start(plan, rank) for rank in range(plan.world_size)]

    @property
    def last_step(self) -> int:
        """The last step that any member has acknowledged."""
        return max((member.noted.last_step for member in self.started), default=0)

    def close(self) -> None:
        """Kills those that still run."""
        for member in self.started:
            if member.alive:
                member.kill()
