"""What goes over the network of the model. Compared by value: a message that is on its way is not put there again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shardam_proto.v1 import shard_pb2
from shardam_server.shard.groups.roster import JoinRequest
from shardam_server.shard.groups.values import Refusal, StepResult
from shardam_server.shard.last_numbers import LastNumbers

Address = int | bytes
"""A shard's index, or a worker's client id."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A body on its way."""

    to: Address
    body: object


# -- worker to shard


@dataclasses.dataclass(frozen=True)
class Open:
    client_id: bytes


@dataclasses.dataclass(frozen=True)
class Join:
    request: JoinRequest


@dataclasses.dataclass(frozen=True)
class Part:
    """A shard's part of a client's number; its content is in the world's book."""

    client_id: bytes
    number: int


@dataclasses.dataclass(frozen=True)
class Close:
    """Closes a number that the shard had refused, for a step that was decided without it."""

    client_id: bytes
    number: int
    step: int


@dataclasses.dataclass(frozen=True)
class Arrive:
    client_id: bytes
    number: int
    step: int
    peaks: Mapping[int, float]
    refusal: Refusal | None


@dataclasses.dataclass(frozen=True)
class Leave:
    client_id: bytes


# -- shard to worker


@dataclasses.dataclass(frozen=True)
class Opened:
    shard: int


@dataclasses.dataclass(frozen=True)
class Joined:
    first_step: int


@dataclasses.dataclass(frozen=True)
class PartAnswer:
    """A part is staged (peaks), its step is decided (result), or it is refused."""

    shard: int
    number: int
    peaks: Mapping[int, float]
    result: StepResult | None = None
    refusal: Refusal | None = None


@dataclasses.dataclass(frozen=True)
class Closed:
    """The number is closed without its part."""

    shard: int
    number: int


@dataclasses.dataclass(frozen=True)
class ArriveAnswer:
    """How a step ended."""

    number: int
    result: StepResult


@dataclasses.dataclass(frozen=True)
class Gone:
    """The client is closed, or a member of no group."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Left:
    pass


# -- home to a peer, and back; life: of home, whose calls end with it


@dataclasses.dataclass(frozen=True)
class Update:
    life: int
    request: shard_pb2.UpdateGroupRequest


@dataclasses.dataclass(frozen=True)
class Updated:
    life: int
    shard: int
    version: int
    step: int


@dataclasses.dataclass(frozen=True)
class Check:
    life: int
    request: shard_pb2.CheckStepRequest


@dataclasses.dataclass(frozen=True)
class Checked:
    life: int
    shard: int
    request: shard_pb2.CheckStepRequest
    refusal: Refusal | None


@dataclasses.dataclass(frozen=True)
class End:
    life: int
    client_id: bytes


@dataclasses.dataclass(frozen=True)
class Ended:
    life: int
    shard: int
    client_id: bytes
    numbers: LastNumbers


@dataclasses.dataclass(frozen=True)
class Settle:
    life: int
    client_id: bytes
    numbers: tuple[tuple[int, tuple[int, ...]], ...]
    settled: bool


@dataclasses.dataclass(frozen=True)
class Settled:
    """Without a last number: it could not be done, and home asks again where the client stands."""

    life: int
    shard: int
    client_id: bytes
    last_number: int | None
    settled: bool
