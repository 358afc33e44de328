"""Children that leave, and others that take their place: small programs stand in for shards that are resharded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shardam_testing.child_family import HANG_S, SERVER, Family, never, run_groups, until
from shardam_testing.process_table import is_running

from shardam_server import supervisor as supervisor_module
from shardam_server.command_errors import CommandError
from shardam_server.supervisor import Group, Kept, RestartPolicy, Supervisor

LEAVES = RestartPolicy(delay_s=0.01, max_delay_s=0.05, limit=5, final_status=2, leaving_status=76)

MOVING = SERVER.replace("sys.exit(0)", "sys.exit(76)")
"""Ends as a shard does whose state has moved to another number of shards."""


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)


def pid_of(kept: Kept) -> int:
    assert kept.child.pid is not None
    return kept.child.pid


def test_children_that_have_left_are_replaced_once_all_of_them_have_ended_and_the_other_groups_stay(family: Family) -> None:
    redis = family.add("redis")
    old = [family.add(f"old {index}", MOVING, LEAVES, after=(redis,)) for index in range(2)]
    new: list[Kept] = []
    heard = []

    async def replace() -> list[Kept]:
        assert family.alive() == ["redis"]
        new.extend(family.add(f"new {index}", policy=LEAVES, after=(redis,)) for index in range(3))
        return new

    async def note() -> None:
        heard.append(sorted(family.alive()))

    async def leave(supervisor: Supervisor) -> None:
        os.kill(pid_of(old[0]), 15)
        await until(lambda: not is_running(pid_of(old[0])))
        assert new == []  # one of them serves still
        os.kill(pid_of(old[1]), 15)
        await until(lambda: bool(heard))
        supervisor.request_stop("test")

    assert run_groups([Group([redis]), Group(old, replace=replace, when_replaced=note)], leave) is True
    assert heard == [["new 0", "new 1", "new 2", "redis"]]
    assert [kept.starts for kept in (redis, *old, *new)] == [1, 1, 1, 1, 1, 1]
    assert family.ended()[-1] == "redis"
    assert family.alive() == []


def test_a_child_that_is_killed_while_its_group_leaves_is_not_started_again(family: Family) -> None:
    old = [family.add(f"old {index}", MOVING, LEAVES) for index in range(2)]
    new: list[Kept] = []

    async def replace() -> list[Kept]:
        new.append(family.add("new"))
        return new

    async def leave(supervisor: Supervisor) -> None:
        os.kill(pid_of(old[0]), 15)
        await until(lambda: not is_running(pid_of(old[0])))
        await until(lambda: not old[1].ready.is_set())  # it is waited for, no longer kept
        os.kill(pid_of(old[1]), 9)
        await until(lambda: bool(new) and new[0].ready.is_set())
        supervisor.request_stop("test")

    assert run_groups([Group(old, replace=replace)], leave) is True
    assert [kept.starts for kept in old] == [1, 1]


def test_a_child_that_never_hears_that_its_group_leaves_is_ended(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_LEAVE_S", 0.1)
    moving, deaf = family.add("moving", MOVING, LEAVES), family.add("deaf", SERVER, LEAVES)
    new: list[Kept] = []

    async def replace() -> list[Kept]:
        new.append(family.add("new"))
        return new

    async def leave(supervisor: Supervisor) -> None:
        os.kill(pid_of(moving), 15)
        await until(lambda: bool(new) and new[0].ready.is_set())
        supervisor.request_stop("test")

    assert run_groups([Group([moving, deaf], replace=replace, drain_s=HANG_S)], leave) is True
    assert family.ended() == ["moving", "deaf", "new"]


def test_a_child_whose_settings_are_refused_only_because_its_group_has_left_is_replaced(family: Family) -> None:
    moved = False
    new: list[Kept] = []

    async def has_left() -> bool:
        return moved

    async def replace() -> list[Kept]:
        new.append(family.add("new"))
        return new

    switch = family.folder / "refuse"
    program = f"import os, sys\nif os.path.exists({str(switch)!r}): sys.exit(2)\n{SERVER}"
    old = family.add("old", program, LEAVES, has_left=has_left)

    async def leave(supervisor: Supervisor) -> None:
        nonlocal moved
        moved = True
        switch.touch()
        os.kill(pid_of(old), 9)
        await until(lambda: bool(new) and new[0].ready.is_set())
        supervisor.request_stop("test")

    assert run_groups([Group([old], replace=replace)], leave) is True
    assert old.starts == 2


def test_a_stop_while_a_group_leaves_ends_its_children_and_starts_no_others(family: Family) -> None:
    old = [family.add(f"old {index}", MOVING, LEAVES) for index in range(2)]

    async def replace() -> list[Kept]:
        raise AssertionError("nobody is to take their place")

    async def leave(supervisor: Supervisor) -> None:
        os.kill(pid_of(old[0]), 15)
        await until(lambda: not is_running(pid_of(old[0])))
        supervisor.request_stop("test")

    assert run_groups([Group(old, replace=replace)], leave) is True
    assert family.alive() == []


def test_readiness_of_all_counts_those_that_took_a_place(family: Family) -> None:
    """A group that leaves before everything is ready is ready when its successors are."""
    mute = family.add("mute", MOVING.replace('(folder / f"{name}-{os.getpid()}").touch()', "os.kill(os.getpid(), 15)"), LEAVES)
    seen = []

    async def replace() -> list[Kept]:
        return [family.add("new")]

    async def stop(supervisor: Supervisor) -> None:
        seen.extend(family.alive())
        supervisor.request_stop("test")

    assert run_groups([Group([mute], replace=replace)], stop) is True
    assert seen == ["new"]


def test_a_child_that_leaves_without_a_successor_stops_everything(family: Family) -> None:
    good, moving = family.add("good"), family.add("moving", MOVING, LEAVES)

    async def leave(supervisor: Supervisor) -> None:
        os.kill(pid_of(moving), 15)
        await never()

    with pytest.raises(CommandError, match="moving has left, and there is nobody to take its place"):
        run_groups([Group([good]), Group([moving])], leave)
    assert family.alive() == []
