"""A checkpoint's writer that stands still holds nobody up: pushes and pulls go on, and the files are as of the cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shardam_testing.faults.checkpoint_calls import CheckpointCalls
from shardam_testing.faults.checkpoint_files import compare_shard, read_checkpoint
from shardam_testing.faults.state_files import oracles_at
from shardam_testing.gated_shard import GATE
from shardam_testing.processes import Shards, running_valkey
from shardam_testing.raw_client import raw_client

from shardam_proto.schema import TableSpec
from shardam_proto.v1 import job_pb2

HANG_S = 200.0
"""What takes seconds on an idle machine."""

DIM = 8
NUM_ROWS = 30_000
"""Rows at the cut: several of the pages of a MiB in which the writer reads, so that most are changed before they are read."""


@pytest.mark.case("C075")
@pytest.mark.timeout(HANG_S)
def test_a_push_completes_while_the_writer_of_a_checkpoint_stands_still(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    flags = {"data_dir": str(tmp_path / "state"), "journal": "write", "journal_limit_mib": "1024"}
    with running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 1, environment={GATE: str(gate)}, module="shardam_testing.gated_shard")
        try:
            shards.start(0, **flags)
            view = shards.wait_ready()
            calls = CheckpointCalls(shards.view)
            row_ids = range(NUM_ROWS)
            with raw_client(view) as client:
                client.open()
                table = client.create(TableSpec("rows", DIM))[0]
                client.push(1, table, row_ids, np.ones((NUM_ROWS, DIM)))
                job = calls.create("gated")
                assert job.state == job_pb2.JOB_STATE_RUNNING, job.problem
                at_cut = client.status().header.change_number
                # every row that the writer has not read yet, and rows that come after the cut
                for number in range(2, 6):
                    client.push(number, table, range(2 * NUM_ROWS), np.full((2 * NUM_ROWS, DIM), number))
                after = client.pull(table, row_ids)
                assert calls.job(job.id).state == job_pb2.JOB_STATE_RUNNING
                status = client.status()
                assert status.pre_image_bytes > 0
                gate.unlink()
                calls.done(job)
                assert np.array_equal(client.pull(table, row_ids), after)
                assert client.status().pre_image_bytes == 0
                stored = read_checkpoint(tmp_path / "state" / "checkpoints" / "test" / "gated")
                (shard,) = stored.shards
                assert shard.change_number == at_cut
                (oracle,) = oracles_at(Path(status.data_folder), [at_cut])
                assert compare_shard(stored, shard, oracle) == []
                assert stored.num_rows == {"rows": NUM_ROWS}
        finally:
            shards.stop()
