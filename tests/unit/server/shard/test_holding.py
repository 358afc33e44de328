"""A hold keeps changes back, lets those pass that a cut waits for, and ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shardam_proto.errors import QueueFull, ShardNotReady, StaleState
from shardam_server.shard.holding import Holding, Mark
from shardam_server.shard.sequencer import Sequencer

A, B = b"a" * 16, b"b" * 16


class Applied:
    """Starts changes at once, and notes them."""

    def __init__(self, holding: Holding) -> None:
        self.names: list[str] = []
        self.holding = holding

    def run(self, name: str, mark: Mark | None = None, num_bytes: int = 0) -> asyncio.Future[str]:
        def start() -> asyncio.Future[str]:
            self.names.append(name)
            done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            done.set_result(name)
            return done

        return self.holding.run(start, mark, num_bytes)

    def run_now(self, name: str) -> None:
        def start() -> asyncio.Future[str]:
            self.names.append(name)
            return asyncio.get_running_loop().create_future()

        self.holding.run_now(start, 0)


def on_loop(test: Callable[[Holding, Applied], object]) -> None:
    async def run() -> None:
        holding = Holding()
        result = test(holding, Applied(holding))
        if asyncio.iscoroutine(result):
            await result

    asyncio.run(run())


def test_without_a_hold_changes_start_at_once() -> None:
    def test(holding: Holding, applied: Applied) -> None:
        applied.run("x", Mark(A, 1))
        assert applied.names == ["x"]

    on_loop(test)


def test_held_changes_start_in_their_order_once_released() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0)
        futures = [applied.run("a1", Mark(A, 1), 10), applied.run("open"), applied.run("b1", Mark(B, 1), 5)]
        assert applied.names == []
        assert holding.held_bytes == 15
        holding.release(7)
        assert applied.names == ["a1", "open", "b1"]
        assert await asyncio.gather(*futures) == ["a1", "open", "b1"]
        assert holding.held_bytes == 0

    on_loop(test)


def test_changes_up_to_the_target_pass_and_later_ones_do_not() -> None:
    def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0)
        for name, mark in {"a2": Mark(A, 2), "a3": Mark(A, 3), "b9": Mark(B, 9), "end": None}.items():
            applied.run(name, mark)
        holding.advance({A: 2})
        assert applied.names == ["a2"]
        applied.run("a2 again", Mark(A, 2))
        applied.run("a4", Mark(A, 4))
        assert applied.names == ["a2", "a2 again"]
        holding.release(7)
        assert applied.names == ["a2", "a2 again", "a3", "b9", "end", "a4"]

    on_loop(test)


def test_a_hold_ends_by_itself_and_then_refuses_to_go_on() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 0.01)
        assert await asyncio.wait_for(applied.run("x"), 10) == "x"
        assert not holding.held
        with pytest.raises(StaleState) as refused:
            holding.check(7)
        assert refused.value.reason == "HOLD_EXPIRED"

    on_loop(test)


def test_a_repeat_lengthens_a_hold() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 0.01)
        holding.hold(7, 60.0)
        await asyncio.sleep(0.05)
        holding.check(7)

    on_loop(test)


def test_a_new_hold_releases_the_one_before() -> None:
    def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0)
        applied.run("x")
        holding.hold(8, 60.0)
        assert applied.names == ["x"]
        holding.release(7)
        assert holding.held

    on_loop(test)


def test_a_final_hold_that_runs_out_asks_before_it_releases() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        asked: list[int] = []
        holding.hold(7, 0.01, asked.append)
        applied.run("x")
        await asyncio.sleep(0.05)
        assert (asked, applied.names) == ([7], [])
        holding.release(7)
        assert applied.names == ["x"]

    on_loop(test)


def test_what_a_held_change_raises_is_raised_by_its_future() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        def start() -> asyncio.Future[str]:
            failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            failed.set_exception(ValueError("refused"))
            return failed

        holding.hold(7, 60.0)
        change = holding.run(start, None, 0)
        holding.release(7)
        with pytest.raises(ValueError, match="refused"):
            await change

    on_loop(test)


def test_what_a_final_hold_keeps_back_is_refused_when_the_process_ends_and_so_is_what_comes_later() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0, when_expired=lambda hold_id: None)
        assert holding.is_final
        held = [applied.run("a1", Mark(A, 1), 10), applied.run("open")]
        holding.refuse(ShardNotReady("its rows have moved"))
        assert holding.held_bytes == 0
        for change in (*held, applied.run("a2", Mark(A, 2))):
            with pytest.raises(ShardNotReady, match="its rows have moved"):
                await change
        holding.release(7)
        with pytest.raises(ShardNotReady):
            await applied.run("a3", Mark(A, 3))
        assert applied.names == []

    on_loop(test)


def test_a_hold_that_is_not_final_says_so_and_its_end_is_the_end_of_a_final_one() -> None:
    async def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0)
        assert not holding.is_final
        holding.hold(8, 60.0, when_expired=lambda hold_id: None)
        assert holding.is_final
        holding.release(8)
        assert not holding.is_final

    on_loop(test)


def test_a_sealed_hold_lets_nothing_pass_until_it_is_released() -> None:
    def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0, lambda _: None)
        holding.advance({A: 5})
        holding.seal()
        applied.run("a5", Mark(A, 5))
        applied.run_now("settle")
        assert applied.names == []
        holding.release(7)
        assert applied.names == ["a5", "settle"]
        applied.run_now("after")
        assert applied.names[-1] == "after"

    on_loop(test)


def test_what_a_hold_does_not_stop_starts_before_the_cut() -> None:
    def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0)
        applied.run_now("settle")
        assert applied.names == ["settle"]

    on_loop(test)


def test_no_other_hold_replaces_a_final_one() -> None:
    def test(holding: Holding, applied: Applied) -> None:
        holding.hold(7, 60.0, lambda _: None)
        applied.run("x")
        with pytest.raises(ShardNotReady, match="moving"):
            holding.hold(8, 60.0)
        assert (holding.hold_id, applied.names) == (7, [])

    on_loop(test)


def test_what_is_held_back_takes_room_as_what_is_queued_does() -> None:
    async def run() -> None:
        sequencer = Sequencer(100)
        holding = Holding(sequencer.count_held)
        applied = Applied(holding)
        holding.hold(7, 60.0)
        applied.run("a", num_bytes=60)
        sequencer.check_room()
        applied.run("b", num_bytes=40)
        with pytest.raises(QueueFull, match="100 bytes"):
            sequencer.check_room()
        holding.release(7)
        sequencer.check_room()
        sequencer.close()

    asyncio.run(run())
