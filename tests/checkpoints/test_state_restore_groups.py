"""A restore under a sync group: its members end, and a new group begins anew."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from shardam_testing.processes import Shards, running_shards
from shardam_testing.pushing import HANG_S
from shardam_testing.restoring import create, make_checkpoint, restored, table_state, train, wait_until

import shardam
from shardam_proto.errors import ClusterRestored, ShardamError
from shardam_proto.schema import TableSpec

SPEC = TableSpec("t", 4)


class Member(threading.Thread):
    """One rank of two; steps until it is refused, or has made its steps."""

    def __init__(self, shards: Shards, rank: int, num_steps: int) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.error: ShardamError | None = None
        self._shards = shards
        self._rank = rank
        self._num_steps = num_steps

    def run(self) -> None:
        url, cluster = self._shards.valkey.url, self._shards.cluster
        try:
            with shardam.connect(url, cluster=cluster, mode="sync", rank=self._rank, world_size=2) as worker:
                table = worker.table("t")
                while len(self.steps) < self._num_steps:
                    pushed = table.push(np.arange(40), np.ones((40, SPEC.dim), np.float32), shardam.AdamOptions(lr=0.1))
                    self.steps.append(pushed.step)
        except ShardamError as error:
            self.error = error


def start_group(shards: Shards, num_steps: int) -> list[Member]:
    members = [Member(shards, rank, num_steps) for rank in (0, 1)]
    for member in members:
        member.start()
    return members


def test_members_of_a_sync_group_learn_of_a_restore_and_a_new_group_begins_anew(tmp_path: Path) -> None:
    with running_shards(tmp_path, 2, data_dir=str(tmp_path / "state")) as shards:
        (table,) = create(shards, SPEC)
        train(shards, table)
        saved = table_state(shards, "t")
        name = make_checkpoint(shards)
        members = start_group(shards, 10**9)
        wait_until("the group to step", lambda: all(len(member.steps) > 5 for member in members))
        restored(shards, name)
        for member in members:
            member.join(HANG_S)
        assert [type(member.error) for member in members] == [ClusterRestored] * 2
        assert table_state(shards, "t") == saved
        again = start_group(shards, 4)
        for member in again:
            member.join(HANG_S)
        assert [member.error for member in again] == [None, None]
        assert [member.steps for member in again] == [[4, 5, 6, 7]] * 2
