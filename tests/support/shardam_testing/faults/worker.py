"""A worker without torch that makes a seeded sequence of changes and notes what was acknowledged, line by line, in a file.

Usage: python -m shardam_testing.faults.worker --url URL --seed N --count N --progress FILE [--in-flight N] [--pace-s S] ...

Lines of the progress file are JSON objects: {"client": hex}, {"sent": number} before a change is handed to the client,
{"acknowledged": number} once it and all before it have been answered by every shard, {"pulled": digest, "at": number},
{"error": class, "reason": ..., "message": ...} and {"done": number}. A killed worker loses no line that it has written; at
SIGTERM it ends after the present change, as if it had been its last one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import shardam
from shardam._push_checks import merged_gradient
from shardam.errors import ShardamError
from shardam_testing.faults.sequence import NUM_IDS, TABLES, Assign, Change, Delete, Push, make_change
from shardam_testing.faults.workers import FAILED


class Progress:
    """The file of what happened."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, **values: int | float | str) -> None:
        """Appends one line; it is the kernel's when this returns."""
        os.write(self._descriptor, (json.dumps(values) + "\n").encode())


class Trainer:
    """Makes changes of a sequence.

    Args:
        cluster: a client.
        seed: of the sequence.
        large_rows: as make_change.
        new_rows: as make_change.
    """

    def __init__(self, cluster: shardam.Cluster, seed: int, large_rows: int, new_rows: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._large_rows = large_rows
        self._new_rows = new_rows
        self._tables: Mapping[str, shardam.Table] = {table.name: table for table in cluster.create_tables(list(TABLES))}

    def make(self, number: int, *, wait: bool) -> bool:
        """Makes a change; returns whether it, and so all before it, has been answered."""
        change = make_change(self._seed, number, large_rows=self._large_rows, new_rows=self._new_rows)
        return self._apply(change, wait=wait)

    def _apply(self, change: Change, *, wait: bool) -> bool:
        match change:
            case Delete(spec, row_ids):
                self._tables[spec.name].delete(row_ids)
                return True
            case Assign(spec, row_ids, weight, exp_avg, if_absent):
                self._tables[spec.name].assign(row_ids, weight, exp_avg=exp_avg, if_absent=if_absent)
                return True
            case Push(tables=(only,)) if wait:
                table = self._tables[only.spec.name]
                table.push(only.row_ids, only.gradients, only.options, grad_scale=only.grad_scale)
                return True
            case Push(tables=parts):
                steps = [
                    merged_gradient(
                        self._tables[part.spec.name].info(), part.row_ids, part.gradients, part.options, part.grad_scale
                    )
                    for part in parts
                ]
                self._cluster._queue_push(steps)  # as SparseAdam.step does
                if wait:
                    self.wait()
                return wait

    def wait(self) -> None:
        """Waits until everything has been answered."""
        self._cluster._ready_to_read()

    def pull(self, number: int) -> str:
        """Pulls rows of a table and returns a digest of their bits; they show every change so far."""
        spec = TABLES[number % len(TABLES)]
        places = np.arange(1, NUM_IDS, dtype=np.int64)
        row_ids = places if spec.num_embeddings is not None else (places - 20) * np.int64(1_000_003)
        weights = self._tables[spec.name].pull(row_ids)
        return hashlib.blake2b(weights.tobytes(), digest_size=8).hexdigest()


def train(cluster: shardam.Cluster, arguments: argparse.Namespace, progress: Progress, stop: threading.Event) -> int:
    """Makes the changes of the sequence, all that are left or until it is told to stop; returns how many."""
    trainer = Trainer(cluster, arguments.seed, arguments.large_rows, arguments.new_rows)
    number = 0
    while number < arguments.count and not stop.is_set():
        number += 1
        progress.note(sent=number)
        wait, place = number % arguments.in_flight == 0, arguments.skip + number
        if trainer.make(place, wait=wait):
            progress.note(acknowledged=number)
        if number % arguments.pull_every == 0:
            digest = trainer.pull(place)
            progress.note(acknowledged=number)
            progress.note(pulled=digest, at=place)
        stop.wait(arguments.pace_s)
    trainer.wait()
    progress.note(acknowledged=number)
    return number


def main() -> int:
    """Runs a worker; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--cluster", default="test")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--pull-every", type=int, default=10)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--large-rows", type=int, default=0)
    parser.add_argument("--new-rows", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="changes of the sequence that were made before this worker")
    parser.add_argument("--shard-timeout-s", type=float, default=120.0)
    arguments = parser.parse_args()
    progress, stop = Progress(arguments.progress), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        with shardam.connect(arguments.url, cluster=arguments.cluster, shard_timeout_s=arguments.shard_timeout_s) as cluster:
            progress.note(client=cluster._session.client_id.hex())
            count = train(cluster, arguments, progress, stop)
    except ShardamError as error:
        progress.note(error=type(error).__name__, reason=error.reason, message=error.message)
        return FAILED
    progress.note(done=count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
