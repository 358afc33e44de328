"""Many at once: clients that start before the shards, and readers of a row beside its writer."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.processes import Shards, clean_environment, running_shards, running_valkey
from shardam_testing.reference_table import ReferenceTable

import shardam
from shardam import AdamOptions, TableSpec

DIM = 8
LR = AdamOptions(lr=0.1)
ROW = np.array([3], np.int64)

EARLY_CLIENTS = """
import sys, threading
import numpy as np, shardam

def train(number):
    with shardam.connect(sys.argv[1], cluster="test") as cluster:
        table = cluster.create_table(shardam.TableSpec(f"t{number % 2}", 2))
        table.push([7], np.ones((1, 2), np.float32), shardam.AdamOptions(lr=0.1))
        steps.append(table.pull([7, 8]).shape)

steps = []
threads = [threading.Thread(target=train, args=(number,)) for number in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert steps == [(2, 2)] * 10, steps
"""


@pytest.mark.case("C059")
def test_forty_clients_that_start_before_the_shards_all_get_through(tmp_path: Path) -> None:
    with running_valkey() as valkey:
        early = [
            subprocess.Popen(
                [sys.executable, "-c", EARLY_CLIENTS, valkey.url], env=clean_environment(), stderr=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        shards = Shards(valkey, tmp_path, 5)
        try:
            for index in range(5):
                shards.start(index)
            shards.wait_ready(100)
            for process in early:
                _, errors = process.communicate(timeout=120)
                assert process.returncode == 0, errors
            with shardam.connect(valkey.url, cluster="test") as cluster:
                for name in ("t0", "t1"):
                    stats = cluster.table(name).stats()
                    assert (stats.num_rows, stats.table_step) == (1, 20)
        finally:
            for process in early:
                process.kill()
                process.wait()
            shards.stop()


@pytest.mark.case("C058")
def test_weight_moments_and_step_of_a_row_are_of_one_moment_while_it_is_pushed(tmp_path: Path) -> None:
    gradients = np.random.default_rng(58).standard_normal((300, DIM)).astype(np.float32)
    with running_shards(tmp_path) as shards, shardam.connect(shards.valkey.url, cluster="test") as writer:
        table = writer.create_table(TableSpec("t", DIM))
        expected = states_after_each_push(table.spec, table.info().table_seed, gradients)
        finished, seen = threading.Event(), set[int]()

        def read_until_finished() -> None:
            with shardam.connect(shards.valkey.url, cluster="test") as reader:
                own = reader.table("t")
                while not finished.is_set():
                    rows = own.rows(ROW)
                    seen.add(step := int(rows.step[0]))
                    if rows.found[0]:
                        assert (
                            b"".join(part.tobytes() for part in (rows.weight, rows.exp_avg, rows.exp_avg_sq)) == expected[step]
                        )

        problems: list[BaseException] = []

        def reader() -> None:
            try:
                read_until_finished()
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                problems.append(error)

        threads = [threading.Thread(target=reader) for _ in range(2)]
        for thread in threads:
            thread.start()
        for gradient in gradients:
            table.push([3], gradient[None], LR)
        finished.set()
        for thread in threads:
            thread.join(60)
        assert problems == []
        assert len(seen) > 5, "the readers saw the writer at work"


def states_after_each_push(spec: TableSpec, table_seed: int, gradients: npt.NDArray[np.float32]) -> dict[int, bytes]:
    """Returns the bits of row 3 after each push (weight, exp_avg, exp_avg_sq), by the reference."""
    table = ReferenceTable(spec, table_seed)
    states = {}
    for step, gradient in enumerate(gradients, start=1):
        table.push(ROW, gradient[None], LR)
        states[step] = table.rows()[3]
    return states
