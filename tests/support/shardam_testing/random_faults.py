"""Faults drawn at random for a scripted shard, in a repeatable order."""

from __future__ import annotations

import collections
import random

from shardam.errors import QueueFull, RowLimit, ShardNotReady
from shardam_testing.scripted_shards import FAIL_BEFORE, HOLD, LOSE_ANSWER, SWALLOW, Fault, ScriptedShard

RATES: dict[str, float] = {LOSE_ANSWER: 0.06, FAIL_BEFORE: 0.06, SWALLOW: 0.01, HOLD: 0.1}
REFUSALS = {"QUEUE_FULL": 0.05, "NOT_READY": 0.05, "ROW_LIMIT": 0.04}
RESTARTS = 0.02


class RandomFaults(collections.deque[Fault]):
    """Never used up, and mostly no fault at all."""

    def __init__(self, shard: ScriptedShard, seed: int, *, holds: bool = True, refuses: bool = True) -> None:
        super().__init__([None])
        self._shard = shard
        self._rates = {**RATES, **REFUSALS}
        if not holds:  # with one number in flight there is no next answer to wait for
            del self._rates[HOLD]
        if not refuses:
            del self._rates["ROW_LIMIT"]
        self._random = random.Random(seed)

    def popleft(self) -> Fault:
        if self._random.random() < RESTARTS:
            self._shard.restart()  # within the shard's lock: the present message still counts
            self._shard.fired["restart"] += 1
        draw = self._random.random()
        for name, rate in self._rates.items():
            draw -= rate
            if draw < 0:
                match name:
                    case "QUEUE_FULL":
                        return QueueFull("full")
                    case "NOT_READY":
                        return ShardNotReady("drains")
                    case "ROW_LIMIT":
                        return RowLimit("no room for new rows")
                return name
        return None
