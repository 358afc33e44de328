"""What was meant for a state that another one has replaced never reaches the new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine

import pytest
from shardam_testing.matrix import num_threads
from shardam_testing.shard_states import shard_context

from shardam_proto.errors import ShardNotReady
from shardam_server.shard.context import ShardContext
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.state import ShardState


def on_loop(test: Callable[[ShardContext], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        shard = shard_context(0)
        try:
            await test(shard)
        finally:
            shard.sequencer.close()

    asyncio.run(run())


async def replace(shard: ShardContext) -> ShardState:
    """Puts a new state in the place of the former one, between two changes."""
    new = ShardState(CpuDevice(num_threads()))

    def switch() -> None:
        shard.state = new

    await shard.sequencer.change(switch)
    return new


def test_a_change_that_waits_in_the_queue_is_refused_as_retryable() -> None:
    async def test(shard: ShardContext) -> None:
        applied: list[str] = []
        gate = threading.Event()
        shard.submit(gate.wait)
        replacing = asyncio.ensure_future(replace(shard))
        await asyncio.sleep(0)  # its switch is in the queue
        change = shard.submit(lambda: applied.append("late"))
        gate.set()
        await replacing
        with pytest.raises(ShardNotReady, match="takes a checkpoint over"):
            await change
        assert applied == []
        await shard.change(lambda: applied.append("new"))
        assert applied == ["new"]

    on_loop(test)


def test_a_change_that_a_hold_keeps_back_is_refused_once_released() -> None:
    async def test(shard: ShardContext) -> None:
        shard.holding.hold(7, 60.0)
        applied: list[str] = []
        held = shard.submit(lambda: applied.append("held"))
        await replace(shard)
        shard.holding.release(7)
        with pytest.raises(ShardNotReady, match="takes a checkpoint over"):
            await held
        assert applied == []

    on_loop(test)


def test_streams_that_are_open_end_and_later_ones_stay() -> None:
    async def test(shard: ShardContext) -> None:
        waiting = asyncio.ensure_future(shard.streams.wait_for_drain())
        await asyncio.sleep(0)
        shard.streams.end_all()
        await asyncio.wait_for(waiting, 30)
        later = asyncio.ensure_future(shard.streams.wait_for_drain())
        await asyncio.sleep(0)
        assert not later.done()
        shard.streams.drain()
        await asyncio.wait_for(later, 30)

    on_loop(test)
