"""What a network does to a shard's traffic, as values: the proxy acts them out and notes each when it fires."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import Literal

MessageKind = Literal[
    "part", "staged", "arrive", "result", "update", "updated", "hold", "advance", "cut", "written", "check", "adopt"
]
"""A member's part and its STAGED; Arrive and its answer with a result; home's UpdateGroup with a decision and its answer.

Home's Hold, Advance and Cut, a shard's answer that it has written a cut, home's CheckFiles and AdoptPlan."""


class Direction(enum.Enum):
    """Which way bytes go."""

    REQUESTS = "requests"
    REPLIES = "replies"


@dataclasses.dataclass(frozen=True)
class Delay:
    """Bytes of one direction come late; nothing is lost.

    Attributes:
        seconds: how late.
        direction: which way.
        after_bytes: bytes of this direction that pass before, from the moment the fault is armed.
        pieces: how many pieces (what one read brings, at most 64 KiB) are late.
    """

    seconds: float
    direction: Direction = Direction.REQUESTS
    after_bytes: int = 0
    pieces: int = 1


@dataclasses.dataclass(frozen=True)
class Drop:
    """A connection's packets are lost, both ways, for a while; then TCP sends them again: nothing of the stream is missing.

    Attributes:
        seconds: how long.
        direction: in which bytes are counted.
        after_bytes: as Delay.
    """

    seconds: float
    direction: Direction = Direction.REQUESTS
    after_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Cut:
    """A connection ends on both sides once so many bytes have passed; not one more does.

    Attributes:
        after_bytes: as Delay; 0: before the next byte.
        direction: in which bytes are counted.
        reset: True: by RST, as when a host goes; False: by FIN, as when a process ends.
    """

    after_bytes: int = 0
    direction: Direction = Direction.REQUESTS
    reset: bool = True


@dataclasses.dataclass(frozen=True)
class Swallow:
    """Requests arrive, their answers do not: an answer and all replies after it are discarded, then the connection is cut.

    Attributes:
        answers: messages of replies that are lost before the cut, at most.
        calls: whose answers count: "streams" = of calls whose request side is open (a worker's Exchange), "all" = of any.
        seconds: time from the first lost answer to the cut, at most: a client that waits for that answer sends nothing more.
        reset: as Cut.
    """

    answers: int = 1
    calls: Literal["streams", "all"] = "streams"
    seconds: float = 0.3
    reset: bool = True


@dataclasses.dataclass(frozen=True)
class Partition:
    """The shard cannot be reached: new connections are refused, present ones are black holes, until it heals.

    Attributes:
        seconds: how long; None: until the proxy is told to heal.
        direction: in which bytes are counted.
        after_bytes: as Delay.
    """

    seconds: float | None = None
    direction: Direction = Direction.REQUESTS
    after_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Lose:
    """A message of a group's step is lost: the connection is cut before its last byte.

    Attributes:
        kind: which message; of replies: the request was carried out, and its answer is lost.
        from_step: of this step or a later one.
    """

    kind: MessageKind
    from_step: int = 0


NetworkFault = Delay | Drop | Cut | Swallow | Partition | Lose


@dataclasses.dataclass(frozen=True)
class Fired:
    """A fault that happened.

    Attributes:
        kind: what, e.g. "cut" or "kill shard".
        target: to whom, e.g. "shard 0" or "worker 1".
        detail: how, for people.
        at_s: time.monotonic() then.
    """

    kind: str
    target: str
    detail: str = ""
    at_s: float = dataclasses.field(default_factory=time.monotonic)


def kind_of(fault: NetworkFault) -> str:
    """Returns the word by which a fault is counted."""
    return type(fault).__name__.lower()
