"""A cluster that moves to other numbers of shards while a worker trains ends with the bits of a run on two shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardam_testing.faults.cluster import running_fault_cluster
from shardam_testing.faults.fault_free import expected_rows
from shardam_testing.faults.live import read_rows
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import all_rows, run_differences, verify
from shardam_testing.raw_client import raw_client
from shardam_testing.waiting import wait_for

HANG_S = 300.0
"""What takes 20 s on an idle machine."""

pytestmark = pytest.mark.timeout(HANG_S)

SEED = 33
COUNT = 150
NEW_ROWS = 30

MOVES = {30: 4, 90: 1}
"""Acknowledged number -> shards from then on."""


@pytest.mark.parametrize("in_flight", [1, 8])
def test_a_worker_that_trains_through_two_reshards_ends_with_the_bits_of_one_process(tmp_path: Path, in_flight: int) -> None:
    with running_fault_cluster(tmp_path, 2, most_shards=4) as cluster:
        worker = cluster.workers.start(SEED, COUNT, in_flight=in_flight, new_rows=NEW_ROWS, pace_s=0.02)
        for moves, (number, num_shards) in enumerate(MOVES.items(), start=1):
            worker.wait_acknowledged(number)
            cluster.checkpoints.reshard(num_shards)
            wait_for(f"{num_shards} shards", lambda moves=moves: cluster.num_moves == moves, HANG_S)  # type: ignore[misc]
            cluster.wait_ready()
            assert cluster.num_shards == num_shards
        assert cluster.wait_end(worker) == 0, f"{worker.noted.error}\n{worker.log_text()}"
        assert worker.noted.acknowledged == COUNT
        rows = all_rows(cluster)
        with raw_client(cluster.view()) as client:
            tables = {spec.name: client.info(spec.name) for spec in TABLES}
        assert run_differences(expected_rows(SEED, COUNT, tables, new_rows=NEW_ROWS), rows) == []
        verified = verify(cluster)
        verified.check()
        assert [oracle.clients[worker.noted.client_id].last_number for oracle in verified.oracles] == [COUNT]
        assert run_differences(rows, read_rows(cluster.view())) == []
