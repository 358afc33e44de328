"""A worker that trains while its cluster is moved to other numbers of shards: the same bits as without."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from shardam_testing.waiting import wait_for

import shardam

NUM_STEPS = 400
"""At several milliseconds each, training goes on through both moves; where it has to, it waits."""

OPTIONS = shardam.AdamOptions(lr=0.1)

ALL_IDS = np.arange(500)

MOVE_TIMEOUT_S = 120.0
"""Starting four shards takes seconds; ten times that and more is a hang."""


class Worker:
    """Pushes the same steps in every run, in a thread of its own.

    Attributes:
        num_done: steps that were applied.
        failed: what ended it too early.
    """

    def __init__(self, table: shardam.Table) -> None:
        self.num_done = 0
        self.failed: list[BaseException] = []
        self._table = table
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for step in range(NUM_STEPS):
                rng = np.random.default_rng(step)
                row_ids = rng.choice(ALL_IDS, 40)
                self._table.push(row_ids, rng.normal(size=(40, 4)).astype(np.float32), OPTIONS)
                self._table.pull(row_ids)
                self.num_done += 1
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the test looks at it
            self.failed.append(error)

    def has_done(self, num_steps: int) -> bool:
        """Whether it is so far, or has failed."""
        return self.num_done >= num_steps or bool(self.failed)

    def end(self) -> None:
        """Waits for all steps."""
        self._thread.join(MOVE_TIMEOUT_S)
        assert not self._thread.is_alive()
        assert not self.failed


def state_of(table: shardam.Table) -> list[bytes]:
    rows = table.rows(ALL_IDS)
    return [getattr(rows, name).tobytes() for name in ("weight", "exp_avg", "exp_avg_sq", "step", "found")]


def run(folder: Path, counts: tuple[int, ...]) -> list[bytes]:
    """Trains on 2 shards, then on as many as is said, and returns the rows."""
    with shardam.LocalCluster(2, checkpoint_dir=folder, device="cpu") as local:
        table = local.create_table(shardam.TableSpec("t", 4))
        worker = Worker(table)
        for count in counts:
            enough = worker.num_done + 10
            wait_for("some steps", functools.partial(worker.has_done, enough))
            command = [sys.executable, "-m", "shardam_server", "reshard", "--shards", str(count), "--redis", local.redis_url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=MOVE_TIMEOUT_S, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        worker.end()
        scanned = np.sort(np.concatenate([rows.row_ids for rows in table.scan(batch_size=50)]))
        assert (scanned == np.flatnonzero(table.rows(ALL_IDS).found)).all()
        assert local.num_shards == (2, *counts)[-1]
        assert table.stats().table_step == NUM_STEPS
        return state_of(table)


@pytest.mark.case("C062")
def test_rows_are_the_same_bits_whether_or_not_the_cluster_was_moved_while_a_worker_trained(tmp_path: Path) -> None:
    assert run(tmp_path / "moved", (4, 1)) == run(tmp_path / "stayed", ())
