"""A worker without torch that takes steps when it is told to: each a pull for training and a push of the same rows.

Usage: python benchmarks/step_worker.py REDIS_URL CLUSTER MODE RANK WORKERS NUM_ROWS BATCH

Reads commands from stdin, a line each, and answers each with one JSON line: `run N` takes N steps and answers {}, `messages`
answers how many messages of each kind have passed since the last such command; the end of stdin ends it.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Iterator

import numpy as np

import shardam
from shardam._reads import read_weights
from shardam._stream import ExchangeStream, StreamRequest
from shardam_proto.v1 import embedding_pb2

DIM = 64
EXPONENT = 1.05
SEVERAL_BATCHES = 16
"""Batches that take turns, so that steps do not find their rows in the processor's caches."""

Counts = collections.Counter[str]


def count_messages() -> Counts:
    """Counts what this process sends and receives on its streams, by kind of request."""
    counts: Counts = collections.Counter()
    send, deliver = ExchangeStream._messages_of, ExchangeStream._deliver

    def counting_send(self: ExchangeStream, request: StreamRequest) -> Iterator[bytes]:
        for message in send(self, request):
            counts[str(embedding_pb2.ExchangeRequest.FromString(message).WhichOneof("request"))] += 1
            yield message

    def counting_deliver(self: ExchangeStream, data: bytes) -> None:
        counts[str(embedding_pb2.ExchangeResponse.FromString(data).WhichOneof("response"))] += 1
        deliver(self, data)

    ExchangeStream._messages_of, ExchangeStream._deliver = counting_send, counting_deliver  # type: ignore[method-assign]
    return counts


class StepWorker:
    def __init__(self, cluster: shardam.Cluster, rank: int, num_rows: int, batch: int) -> None:
        self._cluster = cluster
        self._table = cluster.create_table(shardam.TableSpec("stepped", DIM))
        rng = np.random.default_rng(rank)
        draws = (rng.zipf(EXPONENT, (SEVERAL_BATCHES, batch)) % num_rows).astype(np.int64)
        self._batches = [np.unique(draw) for draw in draws]
        self._gradients = rng.standard_normal((batch, DIM)).astype(np.float32)
        self._step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            row_ids = self._batches[self._step % SEVERAL_BATCHES]
            self._step += 1
            session = self._cluster._ready_to_read(training=True)  # what a module's forward does, without torch
            read_weights(session, [(self._table.info(), row_ids)], training=True)
            self._table.push(row_ids, self._gradients[: len(row_ids)], shardam.AdamOptions())


def main(arguments: list[str]) -> None:
    url, name, mode, rank, workers, num_rows, batch = arguments
    counts = count_messages()
    os.environ.update(RANK=rank, WORLD_SIZE=workers)  # as a launcher does; an async worker needs neither
    with shardam.connect(url, cluster=name, mode=mode) as cluster:
        worker = StepWorker(cluster, int(rank), int(num_rows), int(batch))
        print("{}", flush=True)  # ready
        for line in sys.stdin:
            match line.split():
                case ["run", steps]:
                    worker.run(int(steps))
                    answer: dict[str, int] = {}
                case ["messages"]:
                    answer = dict(counts)
                    counts.clear()
                case _:
                    sys.exit(f"unknown command {line!r}")
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
