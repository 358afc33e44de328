"""A shard process whose memory fails within a change: it ends at once, and comes back with the change whole or LOST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shardam_testing.breaking_shard import BREAKS
from shardam_testing.processes import running_shards
from shardam_testing.raw_client import raw_client
from shardam_testing.waiting import wait_for

from shardam_proto.errors import JournalFailed, ShardLost
from shardam_proto.schema import TableSpec

ROW_IDS = [1, 2]
GRADIENTS = np.ones((2, 4), np.float32)


def test_a_shard_that_breaks_off_within_a_push_ends_and_replays_it_whole(tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    with running_shards(tmp_path, module="shardam_testing.breaking_shard", data_dir=data_dir) as shards:
        with raw_client(shards.view()) as client:
            client.open()
            table, twin = client.create(TableSpec(BREAKS, 4), TableSpec("twin", 4))
            client.push(1, table, ROW_IDS, GRADIENTS)
            with pytest.raises(JournalFailed, match="start the shard again: it comes back with every change"):
                client.push(2, table, ROW_IDS, GRADIENTS)
        assert shards.processes[0].process.wait(40) == 1
        assert "could not be applied in memory (RuntimeError: injected)" in shards.processes[0].log_text()
        assert shards.view().shards == {}
        shards.processes.clear()
        shards.module = "shardam_server"
        shards.start(0, data_dir=data_dir)
        with raw_client(shards.wait_ready()) as again:
            again.client_id = client.client_id
            assert again.open().header.last_number == 2
            assert again.push(2, table, ROW_IDS, GRADIENTS).steps[0].table_step == 2
            for number in (3, 4):
                again.push(number, twin, ROW_IDS, GRADIENTS)
            moved = again.pull(table, [*ROW_IDS, 9])
            assert np.abs(moved[:2]).sum() > 0
            assert again.read(table, ROW_IDS).table_step == 2
            assert again.read(table, ROW_IDS).rows.exp_avg == again.read(twin, ROW_IDS).rows.exp_avg


def test_a_shard_in_memory_only_that_breaks_off_within_a_push_ends_and_is_lost(tmp_path: Path) -> None:
    with running_shards(tmp_path, module="shardam_testing.breaking_shard") as shards:
        with raw_client(shards.view()) as client:
            client.open()
            (table,) = client.create(TableSpec(BREAKS, 4))
            client.push(1, table, ROW_IDS, GRADIENTS)
            with pytest.raises(JournalFailed, match="is LOST when it is started again"):
                client.push(2, table, ROW_IDS, GRADIENTS)
        assert shards.processes[0].process.wait(40) == 1
        shards.module = "shardam_server"
        shards.start(0)
        wait_for("the shard to register", lambda: 0 in shards.view().shards)
        with raw_client(shards.view()) as again, pytest.raises(ShardLost):
            again.open()
