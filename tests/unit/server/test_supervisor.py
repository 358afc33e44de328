"""Supervision, driven by small programs in place of shards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from shardam_testing.child_family import HANG_S, QUICK, SERVER, Family, never, run, run_groups, until

from shardam_server.children import Child, ChildSpec, Console
from shardam_server.command_errors import CommandError
from shardam_server.supervisor import GaveUp, Group, Kept, RestartPolicy, StartRefused, Supervisor

FINAL = RestartPolicy(delay_s=0.01, max_delay_s=0.05, limit=5, final_status=2)

STUBBORN = SERVER.replace("sys.exit(0)", "pass")
REFUSING = "import sys; print('INFO starts'); print('shardam: no such folder,\\nname another'); sys.exit(2)"
"""Ends as a command with a wrong setting does."""

LEAVING = SERVER.replace("sys.exit(0)", "sys.exit(2)")
FAILING = "import sys; print('line of', sys.argv[1]); sys.exit(3)"


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)


def supervise(groups: list[list[Kept]], during: Callable[[Supervisor], Awaitable[None]], drain_s: float = HANG_S) -> bool:
    return run_groups([Group(group) for group in groups], during, drain_s)


def test_a_drain_stops_the_groups_from_the_last_to_the_first_and_is_orderly(family: Family) -> None:
    groups = [[family.add("redis")], [family.add("shard")], [family.add("admin")]]

    async def stop(supervisor: Supervisor) -> None:
        assert sorted(family.alive()) == ["admin", "redis", "shard"]
        supervisor.request_stop("test")
        await never()

    assert supervise(groups, stop) is True
    assert family.ended() == ["admin", "shard", "redis"]
    assert family.alive() == []


def test_a_child_starts_only_when_what_it_needs_is_ready(family: Family) -> None:
    first = family.add("first")
    second = family.add("second", after=(first,))

    async def stop(supervisor: Supervisor) -> None:
        supervisor.request_stop("test")

    supervise([[first], [second]], stop)
    files = {path.name.partition("-")[0]: path.stat().st_mtime_ns for path in family.folder.glob("*-*")}
    assert files["first"] < files["second"]


def test_a_killed_child_is_started_again(family: Family) -> None:
    kept = family.add("shard")

    async def kill_twice(supervisor: Supervisor) -> None:
        for _ in range(2):
            pid = kept.child.pid
            assert pid is not None
            os.kill(pid, 9)
            await until(lambda pid=pid: kept.child.pid != pid and kept.ready.is_set())  # type: ignore[misc]
        supervisor.request_stop("test")

    assert supervise([[kept]], kill_twice) is True
    assert kept.starts == 3


def test_five_exits_in_a_row_before_ready_stop_everything_and_show_the_last_lines(family: Family) -> None:
    good, bad = family.add("good"), family.add("bad", FAILING)
    with pytest.raises(GaveUp) as caught:
        supervise([[good], [bad]], lambda supervisor: never())
    assert bad.starts == 5
    assert str(caught.value).startswith("bad exited with status 3, 5 times in a row before it was ready")
    assert "\n  line of bad" in str(caught.value)
    assert family.ended() == ["good"]
    assert family.alive() == []


def test_a_child_that_cannot_run_with_its_settings_stops_everything_at_once_with_its_own_last_words(family: Family) -> None:
    good = family.add("good")
    refusing = family.add("shard 0", REFUSING, FINAL, after=(good,))
    with pytest.raises(StartRefused) as caught:
        supervise([[good], [refusing]], lambda supervisor: never())
    assert refusing.starts == 1
    assert str(caught.value) == "shard 0 cannot start: no such folder,\n  name another"
    assert caught.value.exit_code == 2
    assert family.ended() == ["good"]
    assert family.alive() == []


def test_the_same_exit_status_of_a_child_that_served_starts_it_again_and_the_log_says_what_becomes_of_its_rows(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    kept = family.add("shard", LEAVING, FINAL, aftermath="it restarts from its data folder")

    async def end_once(supervisor: Supervisor) -> None:
        pid = kept.child.pid
        assert pid is not None
        os.kill(pid, 15)
        await until(lambda: kept.child.pid != pid and kept.ready.is_set())
        supervisor.request_stop("test")

    supervise([[kept]], end_once)
    assert kept.starts == 2
    assert "shard exited with status 2; it restarts from its data folder; starting it again in 0.01 s" in caplog.messages


def test_being_ready_resets_the_count_of_exits(family: Family) -> None:
    kept = family.add("shard", policy=RestartPolicy(delay_s=0.01, max_delay_s=0.01, limit=2))

    async def kill_often(supervisor: Supervisor) -> None:
        for _ in range(4):
            pid = kept.child.pid
            assert pid is not None
            os.kill(pid, 9)
            await until(lambda pid=pid: kept.child.pid != pid and kept.ready.is_set())  # type: ignore[misc]
        supervisor.request_stop("test")

    assert supervise([[kept]], kill_often) is True


def test_the_delay_doubles_to_its_cap_and_starts_anew_after_readiness() -> None:
    policy = RestartPolicy(delay_s=0.5, max_delay_s=3.0, limit=5)
    assert [policy.delay_after(exits) for exits in range(6)] == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.delay_after(10_000) == 3.0


def test_a_second_request_kills_a_child_that_does_not_drain(family: Family) -> None:
    stubborn = family.add("stubborn", STUBBORN)

    async def stop_twice(supervisor: Supervisor) -> None:
        supervisor.request_stop("first")
        asyncio.get_running_loop().call_later(0, supervisor.request_stop, "second")

    assert supervise([[stubborn]], stop_twice) is False
    assert family.alive() == []


def test_a_child_that_does_not_drain_in_time_is_killed(family: Family) -> None:
    stubborn = family.add("stubborn", STUBBORN)

    async def stop(supervisor: Supervisor) -> None:
        supervisor.request_stop("test")

    assert supervise([[stubborn]], stop, drain_s=0.2) is False
    assert family.ended() == ["stubborn"]  # it was asked
    assert family.alive() == []


def test_a_stop_before_anything_is_ready_ends_all_children(family: Family) -> None:
    never_ready = family.add("sleeper", "import time; time.sleep(600)")

    async def work() -> bool:
        supervisor = Supervisor([Group([never_ready])], HANG_S)
        running = asyncio.ensure_future(supervisor.run(never))
        await until(lambda: never_ready.child.pid is not None)
        supervisor.request_stop("test")
        return await running

    assert run(work()) is True
    assert family.alive() == []


def test_a_program_that_does_not_exist_is_an_error_with_its_name(family: Family) -> None:
    child = Child(ChildSpec("redis", lambda: ["/no/such/program"], os.environ), Console(family.output, "text"))
    kept = Kept(child, lambda pid: never(), QUICK)
    with pytest.raises(CommandError, match=r"redis cannot be started: .*No such file"):
        supervise([[kept]], lambda supervisor: never())


def test_an_error_of_the_readiness_probe_stops_everything(family: Family) -> None:
    good = family.add("good")
    broken = family.add("broken")

    async def refuse(pid: int) -> None:
        raise CommandError("the map is of another version")

    broken_kept = Kept(broken.child, refuse, QUICK)
    with pytest.raises(CommandError, match="another version"):
        supervise([[good], [broken_kept]], lambda supervisor: never())
    assert family.alive() == []
