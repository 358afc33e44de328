"""Plans of faults, as values: what happens, to whom, and when."""

from __future__ import annotations

import dataclasses
import enum
import random

from shardam_testing.faults.network_faults import NetworkFault


@dataclasses.dataclass(frozen=True)
class Acknowledged:
    """The moment when a worker has had a number acknowledged."""

    worker: int
    number: int


@dataclasses.dataclass(frozen=True)
class Stepped:
    """The moment when any member of a group has been through a step."""

    step: int


@dataclasses.dataclass(frozen=True)
class Elapsed:
    """The moment so many seconds after the plan began."""

    seconds: float


When = Acknowledged | Stepped | Elapsed


@dataclasses.dataclass(frozen=True)
class KillShard:
    """SIGKILL; it is started again by the cluster's keeper. Waits until the shard serves if it does not."""

    index: int


@dataclasses.dataclass(frozen=True)
class StopShard:
    """SIGSTOP, and SIGCONT after a while."""

    index: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class KillWorker:
    """SIGKILL."""

    index: int


@dataclasses.dataclass(frozen=True)
class StartWorker:
    """One more worker, which no count knows."""

    seed: int
    pace_s: float


@dataclasses.dataclass(frozen=True)
class StopWorker:
    """SIGSTOP, and SIGCONT after a while."""

    index: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class KillMember:
    """SIGKILL of a member of a group; its launcher starts it again after a while, with one more restart counted.

    Attributes:
        index: of the members started, which may be dead already: then nothing is done.
        again_after_s: how long it is away.
    """

    index: int
    again_after_s: float


@dataclasses.dataclass(frozen=True)
class StopMember:
    """SIGSTOP of a member of a group, and SIGCONT after a while."""

    index: int
    seconds: float


class Phase(enum.Enum):
    """How far a step of a sync group has come."""

    STAGED = "parts staged"
    ARRIVED = "one member arrived"
    DECIDED = "decided, nobody told"
    HALF = "half of them told"


@dataclasses.dataclass(frozen=True)
class KillInPhase:
    """SIGKILL of a shard while a step of a sync group is kept from going on; the shard is started again.

    Attributes:
        phase: how far the step has come on all sides.
        index: the shard.
    """

    phase: Phase
    index: int


@dataclasses.dataclass(frozen=True)
class KillAdmin:
    """SIGKILL; it is started again by the cluster's keeper. Waits until it is alive."""


@dataclasses.dataclass(frozen=True)
class StopAdmin:
    """SIGSTOP, and SIGCONT after a while."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class KillRedis:
    """SIGKILL, and an empty server on the same port after a while."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class StopRedis:
    """SIGSTOP, and SIGCONT after a while: a server that takes connections and does not answer."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class FlushRedis:
    """FLUSHALL."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Arms a fault of the proxy before a shard; it fires at its byte."""

    shard: int
    fault: NetworkFault


@dataclasses.dataclass(frozen=True)
class CutAll:
    """Cuts every connection of a shard at once."""

    shard: int


@dataclasses.dataclass(frozen=True)
class MakeCheckpoint:
    """A process asks home for a checkpoint; the plan goes on."""


@dataclasses.dataclass(frozen=True)
class RestoreLatest:
    """A process asks home to restore the latest checkpoint; the plan goes on."""


@dataclasses.dataclass(frozen=True)
class MoveToShards:
    """A process asks home to move the state to another number of shards; the plan goes on."""

    num_shards: int


ShardAction = KillShard | StopShard
JobAction = MakeCheckpoint | RestoreLatest | MoveToShards
WorkerAction = KillWorker | StartWorker | StopWorker
MemberAction = KillMember | StopMember
RedisAction = KillRedis | StopRedis | FlushRedis
AdminAction = KillAdmin | StopAdmin
NetworkAction = Network | CutAll
Action = ShardAction | KillInPhase | WorkerAction | MemberAction | AdminAction | RedisAction | NetworkAction | JobAction


@dataclasses.dataclass(frozen=True)
class Planned:
    """One fault of a plan."""

    when: When
    action: Action


def spread(rng: random.Random, count: int, first: int, last: int) -> list[int]:
    """Returns moments within a range, in order, one from each of count equal pieces of it."""
    width = (last - first) / count
    return [int(first + width * (place + rng.random())) for place in range(count)]
