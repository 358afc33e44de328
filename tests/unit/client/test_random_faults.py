"""Random faults on three shards at once: every number ends exactly once on every shard, in order and in one way."""

from __future__ import annotations

import collections
import random
import threading

import numpy as np
import pytest
from shardam_testing.random_faults import RandomFaults
from shardam_testing.scripted_client import ScriptedClient, ids_of_shard, scripted_client
from shardam_testing.scripted_shards import FAIL_BEFORE, HOLD, INFO, LOSE_ANSWER, SWALLOW

from shardam import _backoff
from shardam._reads import read_weights
from shardam.errors import QueueFull, RowLimit, ShardNotReady, ShardUnreachable

NUM_CHANGES = 90
"""A few times the numbers that may be in flight and queued."""

CHUNK = 4096
DIM = 8

LATE = (QueueFull, ShardNotReady, ShardUnreachable)
"""What is raised when faults, or a slow machine, took more than the time-out."""


class RandomCuts(collections.deque[int]):
    """Cuts one large push in seven, at any of its chunks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.append(3)

    def popleft(self) -> int:
        cut = super().popleft()
        self.append(self._random.randrange(70))  # beyond the last chunk: no cut until the next that fits
        if self[0] > 9:
            self.clear()
        return cut


def settle(client: ScriptedClient) -> int:
    """Waits until every number has ended; returns how many refusals were raised."""
    num_refused = 0
    while not client.session.ended:
        try:
            client.pusher.flush()
        except RowLimit:
            num_refused += 1
        except LATE:
            continue  # what is queued is sent on
        else:
            return num_refused
    raise AssertionError(f"the client has ended: {client.session.failure!r}")


def send(client: ScriptedClient, number: int) -> int:
    """Sends one change of a kind that its number gives; returns how many refusals were raised."""
    row_ids = ids_of_shard(number % 3, 2)
    push = client.push_of(ids_of_shard(number % 3, 1000), float(number), DIM) if number % 6 == 2 else client.push_of(row_ids)
    num_refused = settle(client) if number % 6 < 2 else 0
    while not client.session.ended:
        try:
            match number % 6:
                case 0:
                    client.assign(row_ids)
                case 1:
                    client.delete(row_ids)
                case _:
                    client.pusher.submit(push)
        except RowLimit:
            num_refused += 1
            if number % 6 < 2:
                return num_refused
        except LATE:
            num_refused += settle(client)  # a change that waits is sent on
            if number % 6 < 2:
                return num_refused
        else:
            return num_refused
    raise AssertionError(f"the client has ended: {client.session.failure!r}")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_number_ends_once_on_every_shard_in_order_and_in_one_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backoff, "MAX_WAIT_S", 0.1)
    stop = threading.Event()
    with scripted_client(3, shard_timeout_s=4.0, client_lease_s=0.5, chunk_bytes=CHUNK) as client:
        for shard in client.shards:
            shard.faults = RandomFaults(shard, 10 * seed + shard.index)
            shard.cuts = RandomCuts(20 * seed + shard.index)

        def read() -> None:
            row_ids = np.concatenate([ids_of_shard(shard) for shard in range(3)])
            while not stop.wait(0.05):  # beside the changes, not instead of them
                try:
                    (rows,) = read_weights(client.session, [(INFO, row_ids)])
                except (RowLimit, *LATE):
                    continue
                assert (rows[:, 0] == row_ids).all()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            num_refused = sum(send(client, number) for number in range(NUM_CHANGES)) + settle(client)
        finally:
            stop.set()
            reader.join(60)
        assert not client.session.ended
        last = client.shards[0].last
        assert [shard.last for shard in client.shards] == [last] * 3
        ends = [[number for number, _, _ in shard.closed] for shard in client.shards]
        assert ends == [list(range(1, last + 1))] * 3
        num_closed = 0
        for endings in zip(*(shard.closed for shard in client.shards), strict=True):
            kinds = {kind for _, kind, _ in endings}
            applied = kinds - {"skip", "void"}
            num_closed += len(kinds & {"skip", "void"})
            assert kinds == {"skip"} or (len(applied) == 1 and kinds - applied <= {"void"})
            stepped = [INFO.table_id] if "push" in kinds else []
            assert all(tables == stepped for _, kind, tables in endings if kind == "void")
        assert num_refused == num_closed
        fired = sum((shard.fired for shard in client.shards), collections.Counter[str]())
        assert set(fired) >= {LOSE_ANSWER, FAIL_BEFORE, SWALLOW, HOLD, "QueueFull", "RowLimit", "restart", "cut at chunk 3"}
