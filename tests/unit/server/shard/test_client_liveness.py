"""Silence by home's own clock: what counts, what does not, and whom it closes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator

import pytest
from shardam_testing.shard_states import shard_context

from shardam_proto.errors import JournalFull, ShardamError
from shardam_proto.v1 import common_pb2
from shardam_server.shard.client_liveness import TICKS_PER_LEASE, ClientWatch, Silence
from shardam_server.shard.clients import IDLE_S, ClientEntry
from shardam_server.shard.context import ShardContext

LEASE_S = 30.0
TICK_S = LEASE_S / TICKS_PER_LEASE
CLIENT = b"c" * 16


@dataclasses.dataclass
class Watched:
    """Clients under a clock that the test moves."""

    now: float = 1000.0
    clients: dict[bytes, ClientEntry] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.silence = self.restart()

    def restart(self) -> Silence:
        self.silence = Silence(LEASE_S, lambda: self.now)
        return self.silence

    def tick(self, after_s: float = TICK_S) -> dict[bytes, float]:
        self.now += after_s
        return self.silence.tick(self.clients.items())

    def ticks_until_gone(self) -> int:
        """Ticks until the client counts as gone."""
        for count in range(1, 100):
            if CLIENT in self.tick():
                return count
        raise AssertionError("the client is never gone")

    def hear(self, client_id: bytes = CLIENT) -> None:
        self.clients[client_id].last_contact += 1


@pytest.fixture
def watched() -> Watched:
    return Watched(clients={CLIENT: ClientEntry(heartbeats=True)})


def test_a_client_is_gone_once_its_silence_is_over_the_lease(watched: Watched) -> None:
    watched.tick()
    for _ in range(TICKS_PER_LEASE):
        assert watched.tick() == {}
    assert watched.tick() == {CLIENT: pytest.approx(LEASE_S + TICK_S)}


def test_each_sign_of_life_begins_a_full_period(watched: Watched) -> None:
    full = watched.ticks_until_gone()
    watched.restart()
    for _ in range(50):
        watched.tick()
        watched.hear()
    assert watched.ticks_until_gone() == full


@pytest.mark.parametrize("gap_s", [10 * TICK_S, LEASE_S, 3600.0])
def test_a_pause_of_home_counts_as_one_tick(watched: Watched, gap_s: float) -> None:
    full = watched.ticks_until_gone()
    watched.restart()
    watched.tick()
    assert watched.tick(gap_s) == {}
    assert watched.ticks_until_gone() == full - 2


def test_time_that_is_passed_over_does_not_count(watched: Watched) -> None:
    full = watched.ticks_until_gone()
    watched.restart()
    watched.tick()
    for _ in range(100):
        watched.now += TICK_S
        watched.silence.pause()
    assert watched.ticks_until_gone() == full - 1


def test_a_restarted_home_gives_everyone_a_full_period(watched: Watched) -> None:
    full = watched.ticks_until_gone()
    watched.restart()
    for _ in range(full - 1):
        watched.tick()
    watched.restart()
    assert watched.ticks_until_gone() == full


def test_clients_without_heartbeats_or_that_are_closed_are_not_watched(watched: Watched) -> None:
    watched.clients = {b"silent" * 2: ClientEntry(), b"closed" * 2: ClientEntry(heartbeats=True, closed=True)}
    for _ in range(5 * TICKS_PER_LEASE):
        assert watched.tick() == {}


def test_one_silent_client_does_not_cost_the_others_their_place(watched: Watched) -> None:
    other = b"o" * 16
    watched.clients[other] = ClientEntry(heartbeats=True)
    for _ in range(5 * TICKS_PER_LEASE):
        watched.hear(other)
        gone = watched.tick()
    assert set(gone) == {CLIENT}


# -- the watch


class ClosesNothing:
    """Ends clients here alone, and refuses as often as a test says."""

    def __init__(self, shard: ShardContext) -> None:
        self.shard = shard
        self.refusals = 0

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def close(self, client_id: bytes, *, wait_s: float = 0.0) -> None:
        if self.refusals:
            self.refusals -= 1
            raise JournalFull("no space")
        await self.shard.change(lambda: self.shard.state.end_client(client_id))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def dropped(shard: ShardContext) -> float:
    return shard.metrics.registry.get_sample_value("shardam_clients_dropped_total", {"cluster": "c", "shard": "0"}) or 0.0


def test_a_silent_client_is_closed_counted_and_named_once_even_if_the_journal_is_full_at_first(
    log: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        shard = shard_context(0)
        clock = Watched()
        closing = ClosesNothing(shard)
        watch = ClientWatch(shard, closing, clock.silence)
        await shard.change(lambda: shard.state.open_client(CLIENT, heartbeats=True))
        closing.refusals = 2
        for _ in range(3 * TICKS_PER_LEASE):
            clock.now += TICK_S
            await watch.close_silent()
        assert closing.refusals == 0
        assert (dropped(shard), shard.state.clients.num_open) == (1.0, 0)
        shard.sequencer.close()

    asyncio.run(scenario())
    lines = [record.getMessage() for record in log.records if record.levelno == logging.INFO]
    assert len(lines) == 1
    assert CLIENT.hex() in lines[0]
    assert "was silent for" in lines[0]


def test_any_request_is_a_sign_of_life_whatever_it_is_answered() -> None:
    async def scenario() -> None:
        shard = shard_context(0)
        entry = await shard.change(lambda: shard.state.open_client(CLIENT, heartbeats=True))
        entry.last_contact -= 100
        before = entry.last_contact
        with pytest.raises(ShardamError):  # it names no protocol version
            shard.check_serving(common_pb2.RequestHeader(client_id=CLIENT))
        assert entry.last_contact > before
        shard.sequencer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("index", [0, 1])
def test_idle_clients_are_forgotten_on_every_shard_but_on_home_none_that_it_has_still_to_settle(index: int) -> None:
    async def scenario() -> None:
        shard = shard_context(index)
        state = shard.state
        for client_id in (b"idle" * 4, b"gone" * 4, b"settled!" * 2):
            state.open_client(client_id)
        state.open_client(CLIENT, heartbeats=True)
        state.end_client(b"gone" * 4)
        state.end_client(b"settled!" * 2, settled=True)
        for _, entry in state.clients:
            entry.last_contact -= IDLE_S + 60
        await ClientWatch(shard, ClosesNothing(shard), Silence(LEASE_S)).forget_idle()
        kept = {client_id for client_id, _ in state.clients}
        assert kept == ({CLIENT, b"gone" * 4} if index == 0 else {CLIENT})
        shard.sequencer.close()

    asyncio.run(scenario())
