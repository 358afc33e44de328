"""The connections of one proxy and the faults that wait for them. Everything here runs on the proxy's event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import socket
import struct
import threading

from shardam_testing.faults.frames import AnswerCounter
from shardam_testing.faults.group_messages import GroupMessage, GroupTraffic
from shardam_testing.faults.network_faults import (
    Cut,
    Delay,
    Direction,
    Drop,
    Fired,
    Lose,
    MessageKind,
    NetworkFault,
    Partition,
    Swallow,
    kind_of,
)

PIECE_BYTES = 65_536
"""Bytes of one read."""


@dataclasses.dataclass(eq=False)
class ArmedFault:
    """A fault that waits for its moment.

    Attributes:
        fault: what it will be.
        left_bytes: bytes of its direction that still pass before it.
        fired: set when it has happened.
    """

    fault: NetworkFault
    left_bytes: int
    fired: threading.Event = dataclasses.field(default_factory=threading.Event)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until it has happened; from any thread.

        Raises:
            AssertionError: it did not in time.
        """
        assert self.fired.wait(timeout_s), f"waited {timeout_s:g} s for {self.fault} to fire"


class Hold:
    """Messages of a step that are kept back, on every connection that brings one, until they are released.

    Args:
        kind: which messages.
        from_step: of this step and later ones.
        pass_first: connections whose messages pass all the same, the first ones that bring any.

    Attributes:
        held: what was kept back; the rest of its connection's direction waits behind it.
        passed: what passed all the same.
    """

    def __init__(self, kind: MessageKind, from_step: int, pass_first: int = 0) -> None:
        self.held: list[GroupMessage] = []
        self.passed: list[GroupMessage] = []
        self._kind, self._from_step, self._pass_first = kind, from_step, pass_first
        self._spared: list[Connection] = []
        self._lost_rank: int | None = None
        self._released = asyncio.Event()

    def release(self, lost_rank: int | None = None) -> None:
        """Lets everything pass but for the messages of one rank, whose connections are cut; on the proxy's loop."""
        self._lost_rank = lost_rank
        self._released.set()

    async def wait(self, connection: Connection, message: GroupMessage) -> bool:
        """Keeps a message back if it is one of those; returns whether it is lost."""
        if self._released.is_set() or message.kind != self._kind or message.step < self._from_step:
            return False
        if connection not in self._spared and len(self._spared) < self._pass_first:
            self._spared.append(connection)
        if connection in self._spared:
            self.passed.append(message)
            return False
        self.held.append(message)
        await self._released.wait()
        return message.rank == self._lost_rank


class Traffic:
    """What has passed and what is to happen.

    Args:
        name: whom the proxy stands before.
        reads_messages: tell the messages of group steps, for Hold and Lose.

    Attributes:
        fired: what has happened, in order.
        bytes_seen: bytes that have gone each way.
        connections: those that are open.
        passing: cleared during a partition.
        holds: messages that are kept back.
    """

    def __init__(self, name: str, *, reads_messages: bool = False) -> None:
        self.fired: list[Fired] = []
        self.bytes_seen: collections.Counter[Direction] = collections.Counter()
        self.connections: set[Connection] = set()
        self.passing = asyncio.Event()
        self.passing.set()
        self.reads_messages = reads_messages
        self.holds: list[Hold] = []
        self._name = name
        self._armed: list[ArmedFault] = []

    def arm(self, fault: NetworkFault) -> ArmedFault:
        """Has a fault happen once."""
        assert self.reads_messages or not isinstance(fault, Lose), "a proxy that reads no messages cannot lose one"
        armed = ArmedFault(fault, 0 if isinstance(fault, Swallow | Lose) else fault.after_bytes)
        self._armed.append(armed)
        return armed

    def heal(self) -> None:
        """Forgets what has not happened, releases what is kept back, and ends a partition."""
        self._armed.clear()
        self.release()
        self.passing.set()

    def hold(self, hold: Hold) -> Hold:
        """Begins to keep messages back."""
        assert self.reads_messages, "a proxy that reads no messages cannot keep one back"
        self.holds.append(hold)
        return hold

    def release(self, lost_rank: int | None = None) -> None:
        """Releases everything that is kept back; see Hold."""
        for hold in self.holds:
            hold.release(lost_rank)
        self.holds.clear()

    def lose(self, message: GroupMessage) -> ArmedFault | None:
        """Returns the fault that loses a message."""
        for armed in self._armed:
            fault = armed.fault
            if isinstance(fault, Lose) and fault.kind == message.kind and message.step >= fault.from_step:
                return armed
        return None

    def part(self, fault: Partition) -> None:
        """Begins a partition."""
        self.passing.clear()
        self.note("partition", f"{len(self.connections)} connections")
        if fault.seconds is not None:
            asyncio.get_running_loop().call_later(fault.seconds, self.passing.set)

    def cut_all(self) -> None:
        """Cuts every connection."""
        for connection in list(self.connections):
            self.note("cut", "at once")
            connection.end(reset=True)

    def note(self, kind: str, detail: str) -> None:
        """Notes that something has happened."""
        self.fired.append(Fired(kind, self._name, detail))

    def settle(self, armed: ArmedFault, detail: str) -> None:
        """Notes that an armed fault has happened."""
        if armed in self._armed:
            self._armed.remove(armed)
        self.note(kind_of(armed.fault), detail)
        armed.fired.set()

    def claim(self, direction: Direction, num_bytes: int) -> ArmedFault | None:
        """Takes the fault that happens first within the next bytes of a direction, so that one connection alone acts it out."""
        due = [
            armed for armed in self._armed if not isinstance(armed.fault, Swallow | Lose) and armed.fault.direction is direction
        ]
        first = min(due, key=lambda armed: armed.left_bytes, default=None)
        if first is None or first.left_bytes > num_bytes:
            return None
        self._armed.remove(first)
        return first

    def give_back(self, armed: ArmedFault) -> None:
        """Arms a claimed fault again: its connection ended before its byte."""
        self._armed.insert(0, armed)

    def swallow(self) -> ArmedFault | None:
        """Returns the fault that discards replies now."""
        return next((armed for armed in self._armed if isinstance(armed.fault, Swallow)), None)

    def take_swallow(self, armed: ArmedFault) -> ArmedFault:
        """Takes a fault that has begun on one connection, so that no other begins it."""
        self._armed.remove(armed)
        return armed

    def count(self, direction: Direction, num_bytes: int) -> None:
        """Counts bytes that go a way."""
        self.bytes_seen[direction] += num_bytes
        for armed in self._armed:
            if not isinstance(armed.fault, Swallow | Lose) and armed.fault.direction is direction:
                armed.left_bytes = max(armed.left_bytes - num_bytes, 0)


class Connection:
    """One connection and its other half.

    Args:
        traffic: of the proxy.
        reader: the client's side.
        writer: the client's side.
    """

    def __init__(self, traffic: Traffic, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._traffic = traffic
        self._reader = reader
        self._writers = [writer]
        self._passing = asyncio.Event()
        self._passing.set()
        self._answers = AnswerCounter()
        self._messages = GroupTraffic() if traffic.reads_messages else None
        self._swallow: ArmedFault | None = None
        self._num_swallowed = 0

    async def run(self, target_port: int) -> None:
        """Passes bytes both ways until either side ends."""
        try:
            shard_reader, shard_writer = await asyncio.open_connection("127.0.0.1", target_port)
        except OSError:
            self.end(reset=True)  # as a host without the shard answers, one moment later
            return
        client_writer = self._writers[0]
        self._writers.append(shard_writer)
        for writer in self._writers:
            writer.transport.set_write_buffer_limits(high=0)  # drained means handed to the kernel
        pumps = [
            asyncio.create_task(self._pump(Direction.REQUESTS, self._reader, shard_writer)),
            asyncio.create_task(self._pump(Direction.REPLIES, shard_reader, client_writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self.end(reset=False)

    def end(self, *, reset: bool) -> None:
        """Ends both sides at once."""
        for writer in self._writers:
            abort(writer, reset=reset)
        self._passing.set()

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                start = 0
                for end, message in () if self._messages is None else self._messages.feed(direction, data):
                    await self._pass(direction, data[start : end - 1], writer)
                    await self._meet(message)
                    start = end - 1
                await self._pass(direction, data[start:], writer)

    async def _pass(self, direction: Direction, data: bytes, writer: asyncio.StreamWriter) -> None:
        while data and not writer.transport.is_closing():
            data = await self._pass_piece(direction, data, writer)

    async def _meet(self, message: GroupMessage) -> None:
        """Does what is to be done before the last byte of a message."""
        for hold in list(self._traffic.holds):
            if await hold.wait(self, message):
                self.end(reset=True)
        armed = self._traffic.lose(message)
        if armed is not None:
            self._traffic.settle(armed, f"{message.kind} of step {message.step}, rank {message.rank}")
            self.end(reset=True)

    async def _pass_piece(self, direction: Direction, data: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Passes bytes up to the next fault, acts it out, and returns the rest."""
        await self._traffic.passing.wait()
        await self._passing.wait()
        armed = self._traffic.claim(direction, len(data))
        piece = data if armed is None else data[: armed.left_bytes]
        try:
            if piece:
                self._traffic.count(direction, len(piece))
                await self._write(direction, piece, writer)
            if writer.transport.is_closing():
                raise ConnectionResetError
        except (ConnectionError, asyncio.CancelledError):  # the other direction may have ended, too
            if armed is not None:
                self._traffic.give_back(armed)
            raise
        if armed is not None:
            await self._act(armed, direction)
        return data[len(piece) :]

    async def _write(self, direction: Direction, piece: bytes, writer: asyncio.StreamWriter) -> None:
        if direction is Direction.REQUESTS:
            self._answers.pass_requests(piece)
        else:
            of_all, of_streams = self._answers.pass_replies(piece)
            if self._discards(of_all, of_streams):
                return
        writer.write(piece)
        await writer.drain()

    def _discards(self, of_all: int, of_streams: int) -> bool:
        """Returns whether a piece of replies with so many answers is discarded."""
        armed = self._swallow or self._traffic.swallow()
        if armed is None or not isinstance(armed.fault, Swallow):
            return False
        num_answers = of_all if armed.fault.calls == "all" else of_streams
        if self._swallow is None:
            if not num_answers:
                return False
            self._swallow = self._traffic.take_swallow(armed)
            asyncio.get_running_loop().call_later(armed.fault.seconds, self._end_swallow)
        self._num_swallowed += num_answers
        if self._num_swallowed >= armed.fault.answers:
            self._end_swallow()
        return True

    def _end_swallow(self) -> None:
        armed = self._swallow
        if armed is not None and isinstance(armed.fault, Swallow) and not armed.fired.is_set():
            self._traffic.settle(armed, f"{self._num_swallowed} answers")
            self.end(reset=armed.fault.reset)

    async def _act(self, armed: ArmedFault, direction: Direction) -> None:
        traffic = self._traffic
        at_byte = f"after {traffic.bytes_seen[direction]} bytes of {direction.value}"
        match armed.fault:
            case Cut(reset=reset):
                traffic.settle(armed, at_byte)
                self.end(reset=reset)
            case Delay(seconds=seconds, pieces=pieces):
                traffic.settle(armed, f"{seconds:g} s {at_byte}")
                if pieces > 1:
                    traffic.arm(dataclasses.replace(armed.fault, after_bytes=0, pieces=pieces - 1))
                await asyncio.sleep(seconds)
            case Drop(seconds=seconds):
                traffic.settle(armed, f"{seconds:g} s {at_byte}")
                self._passing.clear()
                asyncio.get_running_loop().call_later(seconds, self._passing.set)
            case Partition():
                traffic.part(armed.fault)
                armed.fired.set()


def abort(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    """Closes a connection without sending what waits; by RST if told so."""
    connection = writer.transport.get_extra_info("socket")
    if reset and connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
