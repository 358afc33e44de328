"""One fsync answers all that was written before it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shardam_proto.errors import JournalFailed
from shardam_server.shard.journal.group_commit import GroupCommit

DEADLINE_S = 60.0


class SlowDisk:
    """An fsync that takes until it is let go; counts."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.num_syncs = 0
        self.error: OSError | None = None

    def sync(self) -> None:
        self.begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_S)
        self.num_syncs += 1
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> str:
        return f"failed: {error}"


def test_what_gathers_during_an_fsync_shares_the_next_one() -> None:
    disk = SlowDisk()

    async def run() -> None:
        commit = GroupCommit(disk.sync, disk.fail)
        await commit.wait()  # nothing is written, so nothing is waited for
        commit.note_write()
        first = asyncio.ensure_future(commit.wait())
        await asyncio.to_thread(disk.begun.acquire, timeout=DEADLINE_S)
        later = []
        for _ in range(50):
            commit.note_write()
            later.append(asyncio.ensure_future(commit.wait()))
        await asyncio.sleep(0)
        disk.may_end.release()
        await first
        assert not any(future.done() for future in later)
        disk.may_end.release()
        await asyncio.gather(*later)
        await asyncio.to_thread(commit.end)

    asyncio.run(run())
    assert disk.num_syncs == 2


def test_a_failure_reaches_everyone_who_waits_and_everyone_after() -> None:
    disk = SlowDisk()

    async def run() -> None:
        commit = GroupCommit(disk.sync, disk.fail)
        commit.note_write()
        first = asyncio.ensure_future(commit.wait())
        await asyncio.to_thread(disk.begun.acquire, timeout=DEADLINE_S)
        commit.note_write()
        second, gone = asyncio.ensure_future(commit.wait()), asyncio.ensure_future(commit.wait())
        await asyncio.sleep(0)
        gone.cancel()
        disk.error = OSError(5, "broken")
        disk.may_end.release()
        for future in (first, second):
            with pytest.raises(JournalFailed, match=r"failed: .*broken"):
                await future
        with pytest.raises(JournalFailed):
            await commit.wait()
        await asyncio.to_thread(commit.end)

    asyncio.run(run())
    assert disk.num_syncs == 1


def test_ending_syncs_what_is_written() -> None:
    disk = SlowDisk()
    commit = GroupCommit(disk.sync, disk.fail)
    commit.note_write()
    disk.may_end.release()
    commit.end()
    assert disk.num_syncs == 1


def test_the_end_of_the_event_loop_does_not_end_the_thread() -> None:
    disk = SlowDisk()
    commit = GroupCommit(disk.sync, disk.fail)

    async def leave() -> None:
        commit.note_write()
        asyncio.ensure_future(commit.wait())  # noqa: RUF006 - it is meant to be left behind
        await asyncio.sleep(0)

    asyncio.run(leave())
    commit.note_write()
    for _ in range(2):
        disk.may_end.release()
    commit.end()
    assert disk.num_syncs in (1, 2)
