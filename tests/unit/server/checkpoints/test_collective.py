"""Members of a group make one checkpoint together."""

from __future__ import annotations

import asyncio

import pytest

from shardam_proto.errors import BadOption, StepTimeout
from shardam_proto.v1 import job_pb2
from shardam_server.shard.checkpoints.collective import Gathering
from shardam_server.shard.checkpoints.jobs import Job
from shardam_server.shard.clients import Clients
from shardam_server.shard.groups.entries import GroupEntry, Groups
from shardam_server.shard.groups.values import Group, GroupTerms, Member

A, B = b"a" * 16, b"b" * 16


def groups(*client_ids: bytes) -> Groups:
    members = tuple(Member(rank, client_id) for rank, client_id in enumerate(client_ids))
    found = Groups(Clients())
    found.put(GroupEntry(Group("workers", GroupTerms("sync", 2), 1, members)))
    return found


def gathering() -> Gathering:
    return Gathering(Job(job_pb2.JOB_KIND_CREATE), "", 5)


def test_it_is_complete_once_every_member_has_asked() -> None:
    async def run() -> None:
        one = gathering()
        one.add(A, 0, 5, "", b"x" * 16)
        waiting = asyncio.create_task(one.complete(groups(A, B), "workers", 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert "ranks [1]" in one.job.phase
        one.add(B, 1, 5, "", b"")
        await asyncio.wait_for(waiting, 10)
        assert one.additions == {0: b"x" * 16}

    asyncio.run(run())


def test_a_member_that_was_dropped_is_waited_for_no_longer() -> None:
    async def run() -> None:
        one, members = gathering(), groups(A, B)
        one.add(A, 0, 5, "", b"")
        waiting = asyncio.create_task(one.complete(members, "workers", 60.0))
        await asyncio.sleep(0)
        only = groups(A).find("workers")
        assert only is not None
        members.put(only)
        await asyncio.wait_for(waiting, 10)

    asyncio.run(run())


def test_a_member_that_never_asks_is_named() -> None:
    async def run() -> None:
        one = gathering()
        one.add(A, 0, 5, "", b"")
        with pytest.raises(StepTimeout, match=r"ranks \[1\]") as raised:
            await one.complete(groups(A, B), "workers", 0.01)
        assert raised.value.metadata["missing_ranks"] == "1"

    asyncio.run(run())


@pytest.mark.parametrize(("step", "name", "words"), [(6, "", "after step 6"), (5, "other", "named 'other'")])
def test_members_that_ask_for_something_else_are_refused(step: int, name: str, words: str) -> None:
    one = gathering()
    one.add(A, 0, 5, "", b"")
    with pytest.raises(BadOption, match=words):
        one.add(B, 1, step, name, b"")
    assert list(one.asked) == [A]
