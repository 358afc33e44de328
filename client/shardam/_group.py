"""What a worker says of its group when it connects: checked before anything is sent; what is left out comes from torchrun."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping

from shardam_proto.errors import BadOption
from shardam_proto.schema import check_name
from shardam_proto.v1 import group_pb2

DEFAULT_GROUP = "workers"

RANK_VARIABLE = "RANK"
WORLD_SIZE_VARIABLE = "WORLD_SIZE"
RESTART_COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""What torchrun sets in each worker's environment."""

_MAX_UINT32 = 2**32 - 1
"""Ranks, world sizes, restart counts and bounds travel as uint32."""

_REDUCES = {"mean": group_pb2.REDUCE_MEAN, "sum": group_pb2.REDUCE_SUM}


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """How a worker asked to connect, and what it takes its group to have agreed on.

    Attributes:
        mode: "async": alone; else "sync" or "bounded:N".
        group: the group's name; None: the default one.
        rank: None: torchrun's.
        world_size: None: torchrun's.
        reduce: "mean" or "sum".
    """

    mode: str = "async"
    group: str | None = None
    rank: int | None = None
    world_size: int | None = None
    reduce: str = "mean"


@dataclasses.dataclass(frozen=True)
class GroupOptions:
    """A worker's place in its group.

    Attributes:
        name: the group's name.
        max_staleness: bounded: how many steps a member may be behind another one's pull; None: sync.
        rank: its rank, from 0.
        world_size: number of ranks.
        reduce: sync: "mean" or "sum".
        restart_count: how often its launcher has restarted it.
    """

    name: str
    max_staleness: int | None
    rank: int
    world_size: int
    reduce: str = "mean"
    restart_count: int = 0

    @property
    def is_sync(self) -> bool:
        """True: all members' gradients of a step are merged and applied once."""
        return self.max_staleness is None

    @property
    def mode(self) -> str:
        """The mode as connect takes it."""
        return "sync" if self.max_staleness is None else f"bounded:{self.max_staleness}"

    def terms(self) -> group_pb2.GroupTerms:
        """Returns what all members are to agree on."""
        return group_pb2.GroupTerms(
            mode=group_pb2.GROUP_MODE_SYNC if self.is_sync else group_pb2.GROUP_MODE_BOUNDED,
            max_staleness=self.max_staleness or 0,
            reduce=_REDUCES[self.reduce],
            world_size=self.world_size,
        )

    def __str__(self) -> str:
        """Says who this is, in a message."""
        return f"rank {self.rank} of group {self.name!r}"


def group_options(request: GroupRequest, environment: Mapping[str, str]) -> GroupOptions | None:
    """Checks what connect was asked for.

    Args:
        request: connect's arguments.
        environment: of this process; torchrun sets RANK, WORLD_SIZE and TORCHELASTIC_RESTART_COUNT.

    Returns:
        The place in a group, or None for async.

    Raises:
        BadOption: the mode is unknown, something is missing or out of range, or async got what only a group has.
    """
    if request.mode == "async":
        _refuse_group_arguments(request)
        return None
    max_staleness = _max_staleness(request.mode)
    if request.reduce not in _REDUCES:
        raise BadOption(f"reduce must be 'mean' or 'sum', got {request.reduce!r}")
    if max_staleness is not None and request.reduce != "mean":
        raise BadOption(f"reduce={request.reduce!r} is for mode='sync'; in {request.mode!r} no gradients are merged")
    name = DEFAULT_GROUP if request.group is None else request.group
    check_name(name, "group name")
    world_size = _from_launcher("world_size", request.world_size, WORLD_SIZE_VARIABLE, environment, request.mode)
    rank = _from_launcher("rank", request.rank, RANK_VARIABLE, environment, request.mode)
    if world_size < 1:
        raise BadOption(f"world_size must be at least 1, the number of workers, got {world_size}")
    if rank >= world_size:
        raise BadOption(f"rank must be 0 to world_size - 1 = {world_size - 1}, got {rank}; pass both, or run under torchrun")
    restarts = environment.get(RESTART_COUNT_VARIABLE)
    restart_count = 0 if restarts is None else _from_environment(RESTART_COUNT_VARIABLE, restarts)
    return GroupOptions(name, max_staleness, rank, world_size, request.reduce, restart_count)


def _refuse_group_arguments(request: GroupRequest) -> None:
    given = [name for name in ("group", "rank", "world_size") if getattr(request, name) is not None]
    given += ["reduce"] if request.reduce != "mean" else []
    if given:
        raise BadOption(
            f"only a group of workers has {', '.join(given)}, and mode='async' has no group; pass mode='sync' or "
            f"mode='bounded:N', or leave {'it' if len(given) == 1 else 'them'} out"
        )


def _max_staleness(mode: str) -> int | None:
    """Returns the N of "bounded:N", or None for "sync"."""
    if mode == "sync":
        return None
    found = re.fullmatch(r"bounded:([0-9]{1,10})", mode) if isinstance(mode, str) else None
    if found is None or int(found[1]) > _MAX_UINT32:
        raise BadOption(
            "mode must be 'async', 'sync' or 'bounded:N', such as 'bounded:4' (N >= 0: how many steps a worker may be behind), "
            f"got {mode!r}"
        )
    return int(found[1])


def _from_launcher(name: str, given: int | None, variable: str, environment: Mapping[str, str], mode: str) -> int:
    if given is None:
        if variable not in environment:
            raise BadOption(
                f"mode={mode!r} needs rank= and world_size=, or torchrun, which sets {RANK_VARIABLE} and "
                f"{WORLD_SIZE_VARIABLE}; there is no {name}"
            )
        return _from_environment(variable, environment[variable])
    try:
        number = -1 if isinstance(given, bool) else operator.index(given)  # a NumPy integer is one, a string is none
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_UINT32:
        remedy = f"; under torchrun leave it out, else pass int({given!r})" if isinstance(given, str) else ""
        raise BadOption(f"{name} must be an integer of at least {0 if name == 'rank' else 1}, got {given!r}{remedy}")
    return number


def _from_environment(variable: str, value: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", value) is None or int(value) > _MAX_UINT32:
        raise BadOption(f"the environment's {variable} must be an integer of at least 0, got {value!r}; torchrun sets it")
    return int(value)
