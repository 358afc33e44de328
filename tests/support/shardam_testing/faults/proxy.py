"""A TCP proxy before one shard: it passes bytes both ways and does to them what it is told, at the byte it is told.

It runs on an event loop in a thread of its own; every method may be called from any thread. A shard that is started with
--advertise and the proxy's address has all its gRPC traffic, its peers' too, go through it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Self, TypeVar

from shardam_testing.faults.group_messages import GroupMessage
from shardam_testing.faults.network_faults import Direction, Fired, MessageKind, NetworkFault, Partition
from shardam_testing.faults.traffic import ArmedFault, Connection, Hold, Traffic, abort

T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0
"""The loop answers at once; longer means that it hangs."""


@dataclasses.dataclass(frozen=True)
class HeldMessages:
    """What a hold has met so far; may be asked from any thread."""

    _look: Callable[[], tuple[list[GroupMessage], list[GroupMessage]]]

    @property
    def held(self) -> list[GroupMessage]:
        """Messages that are kept back."""
        return self._look()[0]

    @property
    def passed(self) -> list[GroupMessage]:
        """Messages that passed, of connections that the hold spares."""
        return self._look()[1]


class FaultProxy:
    """Passes connections on to one port of the loopback address. A context manager.

    Args:
        name: whom it stands before, for what it notes.
        target_port: where connections go.
        reads_messages: tell the messages of group steps in what passes, so that they can be kept back or lost.

    Attributes:
        address: where it listens, host:port.
    """

    def __init__(self, name: str, target_port: int, *, reads_messages: bool = False) -> None:
        self.name = name
        self.address = ""
        self._target_port = target_port
        self._traffic = Traffic(name, reads_messages=reads_messages)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy of {name}", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONTROL_TIMEOUT_S)
        self._loop.close()

    def arm(self, fault: NetworkFault) -> ArmedFault:
        """Has a fault happen once, when its moment comes."""
        return self._call(lambda: self._traffic.arm(fault))

    def hold(self, kind: MessageKind, from_step: int, pass_first: int = 0) -> HeldMessages:
        """Keeps messages of a step and later ones back until `release`; arguments as Hold's."""
        hold = self._call(lambda: self._traffic.hold(Hold(kind, from_step, pass_first)))
        return HeldMessages(lambda: self._call(lambda: (list(hold.held), list(hold.passed))))

    def release(self, lost_rank: int | None = None) -> None:
        """Lets everything pass that is kept back.

        Args:
            lost_rank: a member that is gone, whose messages are lost: its connection ends, which nobody sees while it is held.
        """
        self._call(lambda: self._traffic.release(lost_rank))

    def partition(self) -> None:
        """Makes the shard unreachable until `heal`."""
        self._call(lambda: self._traffic.part(Partition()))

    def heal(self) -> None:
        """Forgets all faults that have not happened and ends a partition."""
        self._call(self._traffic.heal)

    def cut_all(self) -> None:
        """Cuts every connection now."""
        self._call(self._traffic.cut_all)

    def bytes_seen(self, direction: Direction) -> int:
        """Returns how many bytes have gone this way."""
        return self._call(lambda: self._traffic.bytes_seen[direction])

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return self._call(lambda: len(self._traffic.connections))

    @property
    def fired(self) -> list[Fired]:
        """What has happened so far, in order."""
        return self._call(lambda: list(self._traffic.fired))

    def count(self, kind: str) -> int:
        """Returns how often a kind of fault has happened."""
        return sum(fired.kind == kind for fired in self.fired)

    def _call(self, action: Callable[[], T]) -> T:
        async def act() -> T:
            return action()

        return self._run(act())

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CONTROL_TIMEOUT_S)

    # -- on the loop

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._traffic.heal()
        while self._traffic.connections:
            for connection in list(self._traffic.connections):
                connection.end(reset=False)
            await asyncio.sleep(0.001)  # their tasks end on this loop

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._traffic.passing.is_set():
            self._traffic.note("refuse", "a new connection")
            abort(writer, reset=True)
            return
        connection = Connection(self._traffic, reader, writer)
        self._traffic.connections.add(connection)
        try:
            await connection.run(self._target_port)
        finally:
            self._traffic.connections.discard(connection)
