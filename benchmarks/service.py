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

small is the latency of a pull of 64 rows beside that of an empty message on the same stream: medians of single calls, as rates
of 1 over them; the goal is 1.3 times the latency at most.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from batches import Float32s, Int64s, gradients, zipf_batches
from frame import Benchmark, Pair, parse, parser_of, repeat, run
from lanes import IN_FLIGHT, Lane, keep_in_flight
from peer_grpc import GrpcLane
from peer_redis import RedisLane, parser_name, running_valkey
from peer_tcp import TcpLane
from processes import SERVER_CORE, WORKER_CORE, Shards, running_peer, running_shards

import shardam
from shardam._calls import StreamCall
from shardam._pull_plan import PullQuestion, ShardRead

if TYPE_CHECKING:
    from peer_rpc import RpcLane

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
    """Our client: distinct rows travel. A push has a thread, which waits for its answer."""

    def __init__(self, shards: Shards, num_rows: int) -> None:
        self.cluster = shardam.connect(shards.redis_url, cluster=shards.cluster)
        self.table = self.cluster.create_table(shardam.TableSpec("rows", DIM, num_embeddings=num_rows))
        self._pulls: collections.deque[shardam.PendingPull] = collections.deque()
        self._pushes: collections.deque[Future[shardam.PushResult]] = collections.deque()
        self._pool = ThreadPoolExecutor(IN_FLIGHT)
        ones = np.ones((FILLED_AT_ONCE, DIM), np.float32)
        for start in range(0, num_rows, FILLED_AT_ONCE):
            ids = np.arange(start, min(start + FILLED_AT_ONCE, num_rows))
            self.table.push(ids, ones[: ids.size], OPTIONS)

    def send_pull(self, row_ids: Int64s) -> None:
        self._pulls.append(self.table.pull_async(row_ids))

    def take_pull(self) -> Float32s:
        return self._pulls.popleft().result()

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        self._pushes.append(self._pool.submit(self.table.push, row_ids, gradients, OPTIONS))

    def take_push(self) -> shardam.PushResult:
        return self._pushes.popleft().result()

    def ask_nothing(self) -> None:
        """Sends a pull of no rows over the stream, as others are sent, and waits for its answer."""
        session = self.cluster._ready_to_read()
        link = session.shards.links[0]
        call = StreamCall(link, PullQuestion(ShardRead(link), session.options.chunk_bytes), 0, session.timings)
        session.answer(call)

    def close(self) -> None:
        self._pool.shutdown()
        self.cluster.close()


class Lanes:
    """What is being measured: servers are started when a benchmark first needs them, and stopped by the stack."""

    def __init__(self, stack: contextlib.ExitStack, *, smoke: bool, flags: Sequence[str]) -> None:
        self._stack = stack
        self._flags = flags
        self._lanes: dict[str, Lane] = {}
        self._num_rows = SMOKE_ROWS if smoke else NUM_ROWS
        self.batches = zipf_batches(self._num_rows, SMOKE_BATCH if smoke else BATCH)
        self.gradients = gradients(self.batches.shape[1], DIM)

    @property
    def ours(self) -> OurLane:
        lane = self.lane("ours")
        assert isinstance(lane, OurLane)
        return lane

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            lane = self._start(name)
            self._stack.callback(lane.close)
            self._lanes[name] = lane
        return self._lanes[name]

    def _start(self, name: str) -> OurLane | TcpLane | RpcLane | RedisLane | GrpcLane:
        batch = self.batches.shape[1]
        match name:
            case "ours":
                shards = self._stack.enter_context(running_shards(flags=self._flags))
                return OurLane(shards, self._num_rows)
            case "redis":
                port = self._stack.enter_context(running_valkey(SERVER_CORE))
                return RedisLane(port, self._num_rows, DIM)
            case "tcp":
                return TcpLane(self._peer("peer_tcp"), DIM, batch)
            case "rpc":
                from peer_rpc import RpcLane  # torch, which the others need not wait for

                return RpcLane(self._peer("peer_rpc"))
            case _:
                return GrpcLane(self._peer("peer_grpc"), DIM)

    def _peer(self, module: str) -> int:
        return self._stack.enter_context(running_peer(module, self._num_rows, DIM))

    def pulling(self, name: str, requests: int) -> Callable[[], object]:
        """Returns work that pulls batches in turn."""
        lane, batches = self.lane(name), itertools.cycle(self.batches)
        return lambda: keep_in_flight(itertools.islice(batches, requests), lane.send_pull, lane.take_pull)

    def pushing(self, name: str, requests: int) -> Callable[[], object]:
        """Returns work that pushes gradients of batches in turn."""
        lane, batches, rows = self.lane(name), itertools.cycle(self.batches), self.gradients

        def send(row_ids: Int64s) -> None:
            lane.send_push(row_ids, rows)

        return lambda: keep_in_flight(itertools.islice(batches, requests), send, lane.take_push)


def batch_pair(smoke: bool, *, lanes: Lanes, kind: str, peer: str) -> Pair:
    requests = SMOKE_REQUESTS if smoke else REQUESTS
    work = lanes.pulling if kind == "pull" else lanes.pushing
    return Pair(requests, work("ours", requests), work(peer, requests))


def small_pair(smoke: bool, *, lanes: Lanes) -> Pair:
    ours, row_ids = lanes.ours, np.unique(lanes.batches)[:SMALL]
    return Pair(1, lambda: ours.table.pull(row_ids), ours.ask_nothing, calls=SMOKE_CALLS if smoke else CALLS)


def benchmarks(lanes: Lanes) -> list[Benchmark]:
    found = [
        Benchmark(
            f"{kind}-{peer}", "batches/s", PEERS[peer], goal, functools.partial(batch_pair, lanes=lanes, kind=kind, peer=peer)
        )
        for (kind, peer), goal in GOALS.items()
    ]
    small = functools.partial(small_pair, lanes=lanes)
    return [*found, Benchmark("small", "pulls/s", "an empty message", SMALL_GOAL, small)]


NAMES = [*(f"{kind}-{peer}" for kind, peer in GOALS), "small"]


def main(arguments: Sequence[str]) -> int:
    """Runs what the command line names; the status is frame.main's."""
    parser = parser_of(NAMES)
    parser.add_argument("--journal", action="store_true", help="the shard keeps a journal, as with a data folder")
    options = parse(parser, NAMES, arguments)
    if options.runs > 1:
        return repeat(options)
    os.sched_setaffinity(0, {WORKER_CORE})
    with contextlib.ExitStack() as stack:
        flags: list[str] = []
        if options.journal:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardam-service-"))
            flags = ["--data-dir", folder, "--journal", "write"]
        if not options.json:
            print(
                f"client on core {WORKER_CORE}, server on core {SERVER_CORE}, journal {'on' if options.journal else 'off'}, "
                f"Redis's answers read by {parser_name()}",
                flush=True,
            )
        return run(benchmarks(Lanes(stack, smoke=options.smoke, flags=flags)), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
