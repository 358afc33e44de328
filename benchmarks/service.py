"""Pulls and pushes of a whole batch over TCP, beside what else one could send it through, in the same run.

Usage: python benchmarks/service.py [--journal] [--json] [--smoke] [--check] [--rounds N] [--runs N] [NAME ...]

Needs the built package and a C compiler, on Linux. One client on one core (the first that this process may use), one server on
another (the last): our shard, or a peer's. A table of 1M rows of 64 float32 with both moments; a batch is 16,384 ids, Zipf
distributed with exponent 1.05, of which 42 % are distinct, and 16 batches take turns; 2 requests are in flight. Ours sends
distinct rows and gives back the rows of all ids, in their order; a push is one step of Adam. The shard keeps no journal unless
--journal says so. Peers:

- tcp: a raw socket that carries every row, before a table in plain C that does the same work.
- rpc: torch.distributed.rpc, forced to TCP, before an nn.Embedding with torch.optim.SparseAdam.
- redis: MGET and MSET of every row on a real Valkey, by redis-py. It does no Adam.
- grpc: a bare gRPC stream of raw bytes with every row, before the same table in plain C. Without a goal.

small is the latency of a pull of 64 rows beside that of an empty message on the same stream: medians of single calls, rates of 1
over them; the goal is 1.3 times the latency at most.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from batches import Float32s, Int64s, gradients, zipf_batches
from frame import Benchmark, Pair, parse, parser_of, repeat, run
from lanes import IN_FLIGHT, Lane, keep_in_flight
from processes import SERVER_CORE, WORKER_CORE, Shards, running_peer, running_shards

import shardam
from shardam._calls import PullCall
from shardam_kernels import native
from shardam_proto.v1 import embedding_pb2

NUM_ROWS, SMOKE_ROWS = 1_000_000, 2_000
BATCH, SMOKE_BATCH = 16_384, 256
DIM = 64
SMALL = 64
CALLS, SMOKE_CALLS = 100, 5
"""Of a round of small: its median is of one call."""

REQUESTS, SMOKE_REQUESTS = 16, 3
"""Of a round: some hundredths of a second of ours, up to half a second of the slowest peer."""

NO_GOAL = 0.0
GOALS = {
    ("pull", "tcp"): 0.9,
    ("push", "tcp"): 0.9,
    ("pull", "rpc"): 1.5,
    ("push", "rpc"): 5.0,
    ("pull", "redis"): 10.0,
    ("push", "redis"): 7.0,
    ("pull", "grpc"): NO_GOAL,
    ("push", "grpc"): NO_GOAL,
}
PEERS = {
    "tcp": "a raw TCP socket",
    "rpc": "torch.distributed.rpc on TCP",
    "redis": "Redis MGET/MSET",
    "grpc": "a bare gRPC stream",
}
SMALL_GOAL = 1 / 1.3
OPTIONS = shardam.AdamOptions(lr=1e-3)
FILLED_AT_ONCE = 50_000


class OurLane:
    """Our client: distinct rows travel."""

    def __init__(self, shards: Shards, num_rows: int) -> None:
        self.cluster = shardam.connect(shards.redis_url, cluster=shards.cluster)
        self.table = self.cluster.create_table(shardam.TableSpec("rows", DIM, num_embeddings=num_rows))
        self._pulls: list[Future[Float32s]] = []
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        ones = np.ones((FILLED_AT_ONCE, DIM), np.float32)
        for start in range(0, num_rows, FILLED_AT_ONCE):
            ids = np.arange(start, min(start + FILLED_AT_ONCE, num_rows))
            self.table.push(ids, ones[: ids.size], OPTIONS)

    def send_pull(self, row_ids: Int64s) -> None:
        self._pulls.append(self._pool.submit(self._pull, row_ids))

    def _pull(self, row_ids: Int64s) -> Float32s:
        distinct, places, _ = native.distinct_ids(row_ids, self.cluster.num_shards)
        return self.table.pull(distinct).take(places, axis=0)

    def take_pull(self) -> Float32s:
        return self._pulls.pop(0).result()

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        self.table.push(row_ids, gradients, OPTIONS)

    def take_push(self) -> None:
        pass

    def close(self) -> None:
        self._pool.shutdown()
        self.cluster.close()
