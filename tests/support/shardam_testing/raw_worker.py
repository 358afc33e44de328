"""A worker made of raw clients: one client id on all shards, with heartbeats; also a process that stops in mid-push.

Usage: python -m shardam_testing.raw_worker REDIS_URL CLUSTER TABLE HEARTBEAT_S SHARD,...

The process pushes number 1 to all shards and number 2 to those named, prints its client id and then heartbeats for ever.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from shardam_proto.errors import ShardamError
from shardam_proto.registry import ClusterView, Keys, connect_redis, read_cluster
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2
from shardam_testing.raw_client import RawClient, raw_client

ROWS_PER_SHARD = 3


class RawWorker:
    """One client on all shards.

    Attributes:
        heard: heartbeats that were answered.
        refused: reason of the first heartbeat that was refused; then no more are sent.
    """

    def __init__(self, shards: list[RawClient]) -> None:
        self.shards = shards
        self.heard = 0
        self.refused = ""
        self._stop = threading.Event()

    @property
    def client_id(self) -> bytes:
        return self.shards[0].client_id

    def push(self, number: int, table: common_pb2.TableInfo, shards: Sequence[int]) -> None:
        """Sends a number's parts to some shards, each with rows of its own."""
        for index in shards:
            self.shards[index].push(number, table, rows_of(index, len(self.shards)), np.ones((ROWS_PER_SHARD, table.spec.dim)))

    def beat(self, every_s: float) -> None:
        """Sends heartbeats to home until one is refused or the worker ends."""
        while not self._stop.wait(every_s):
            try:
                self.shards[0].heartbeat()
                self.heard += 1
            except ShardamError as error:
                if not error.rule.retryable:
                    self.refused = error.reason
                    return

    def stop(self) -> None:
        self._stop.set()


def rows_of(index: int, num_shards: int) -> list[int]:
    """Returns ids that a shard owns."""
    row_ids = np.arange(1000, dtype=np.int64)
    return [int(row_id) for row_id in row_ids[RouteMap(1, num_shards).shards_of(row_ids) == index][:ROWS_PER_SHARD]]


@contextlib.contextmanager
def raw_worker(view: ClusterView, *, heartbeat_s: float | None = None) -> Iterator[RawWorker]:
    """Opens one client on all shards; with heartbeat_s a thread sends heartbeats."""
    with contextlib.ExitStack() as stack:
        worker = RawWorker([stack.enter_context(raw_client(view, index)) for index in sorted(view.shards)])
        for shard in worker.shards:
            shard.client_id = worker.client_id
            shard.open(heartbeats=True)
        if heartbeat_s is not None:
            thread = threading.Thread(target=worker.beat, args=(heartbeat_s,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(worker.stop)
        yield worker


def main(redis_url: str, cluster: str, table_name: str, heartbeat_s: str, shards: str) -> None:
    with contextlib.closing(connect_redis(redis_url)) as connection:
        view = read_cluster(connection, Keys(cluster))
    with raw_worker(view) as worker:
        table = worker.shards[0].info(table_name)
        worker.push(1, table, range(len(worker.shards)))
        worker.push(2, table, [int(index) for index in shards.split(",")])
        sys.stdout.write(worker.client_id.hex() + "\n")
        sys.stdout.flush()
        worker.beat(float(heartbeat_s))
        sys.stdout.write(worker.refused + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
