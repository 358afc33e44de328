"""How a gone client's last numbers ended on each shard, and what a shard lacks of them (PROTOCOL.md, section 4)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from shardam_proto.v1 import shard_pb2
from shardam_server.shard.clients import ClientEntry, check_client_id
from shardam_server.shard.state import ShardState

Settlement = Mapping[int, tuple[int, ...]]
"""Numbers that a shard lacks, in order, each with the tables that stepped by it elsewhere."""


@dataclasses.dataclass(frozen=True)
class LastNumbers:
    """Where a client that takes no more changes stands on one shard.

    Attributes:
        last_number: its last closed number; zero: none, or the client is not known.
        tables: number -> tables that stepped by it here, for the numbers whose outcome is kept.
    """

    last_number: int = 0
    tables: Settlement = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, entry: ClientEntry | None) -> LastNumbers:
        """Reads a client's entry, on the sequencer's thread."""
        if entry is None:
            return cls()
        return cls(entry.last_number, {number: tuple(outcome.steps) for number, (_, outcome) in entry.outcomes.items()})

    @classmethod
    def from_message(cls, message: shard_pb2.EndClientResponse) -> LastNumbers:
        """Reads another shard's answer."""
        return cls(message.last_number, {closed.number: tuple(closed.table_ids) for closed in message.numbers})


class Closing:
    """What is known of one client that is being closed; makes no calls.

    Args:
        client_id: the client.
        shards: indexes of all shards.

    Attributes:
        ended: set once the client is ended on every shard.
    """

    def __init__(self, client_id: bytes, shards: Sequence[int]) -> None:
        self.client_id = client_id
        self.ended = asyncio.Event()
        self._shards = shards
        self._last: dict[int, int] = {}
        self._tables: dict[int, tuple[int, ...]] = {}
        self._passed_over: set[int] = set()

    def has_answered(self, shard: int) -> bool:
        """True: the client is ended there, and its numbers are known."""
        return shard in self._last

    def answer(self, shard: int, numbers: LastNumbers, *, pass_over: bool = False) -> None:
        """Notes where the client stands on a shard.

        Args:
            shard: its index.
            numbers: the client's last numbers there.
            pass_over: the shard takes no numbers that it lacks.
        """
        self._last[shard] = numbers.last_number
        if pass_over:
            self._passed_over.add(shard)
        for number, tables in numbers.tables.items():
            self._tables[number] = max(self._tables.get(number, ()), tables, key=len)
        if self._all_known:
            self.ended.set()

    def settle(self, shard: int, last_number: int) -> None:
        """Notes that a shard has closed numbers up to this one."""
        self._last[shard] = last_number

    def ask_again(self, shard: int) -> None:
        """Forgets where the client stands on a shard: it may have lost state since it told."""
        self._last.pop(shard, None)

    def lacking(self, shard: int) -> Settlement:
        """Returns the numbers that a shard lacks of those that shards have told so far, up to the first unknown one."""
        numbers: dict[int, tuple[int, ...]] = {}
        if shard not in self._last or shard in self._passed_over:
            return numbers
        number = self._last[shard] + 1
        while number <= self._goal and number in self._tables:
            numbers[number] = self._tables[number]
            number += 1
        return numbers

    @property
    def settled(self) -> bool:
        """True: all shards have told, and none lacks a number that can be closed there."""
        return self._all_known and not any(self.lacking(shard) for shard in self._shards)

    def unknown(self) -> dict[int, tuple[int, int]]:
        """Returns for each shard that cannot be brought to the last number the first and last number it lacks."""
        behind = {shard: last for shard, last in self._last.items() if shard not in self._passed_over and last < self._goal}
        return {shard: (last + 1, self._goal) for shard, last in sorted(behind.items())}

    @property
    def _all_known(self) -> bool:
        return len(self._last) == len(self._shards)

    @property
    def _goal(self) -> int:
        return max(self._last.values())


def closed_numbers(numbers: Settlement) -> list[shard_pb2.ClosedNumber]:
    """Returns numbers and their tables as messages."""
    return [shard_pb2.ClosedNumber(number=number, table_ids=table_ids) for number, table_ids in numbers.items()]


def end_here(state: ShardState, client_id: bytes) -> LastNumbers:
    """Ends a client on this shard and tells where it stands; on the sequencer's thread.

    Raises:
        BadOption: no client id.
        JournalFailed, JournalFull: it could not be recorded.
    """
    check_client_id(client_id)
    return LastNumbers.of(state.end_client(client_id))


def settle_here(state: ShardState, client_id: bytes, numbers: Iterable[tuple[int, tuple[int, ...]]]) -> None:
    """Closes numbers that other shards have, in order; on the sequencer's thread. Those closed already are passed over.

    A client that is not known here takes them all the same, and is remembered as closed.

    Raises:
        ClientClosed: numbers before the first are missing.
        UnknownTable: a table is not known; the numbers before it are closed.
        JournalFailed, JournalFull: a number could not be recorded; the numbers before it are closed.
    """
    check_client_id(client_id)
    state.end_client(client_id, remember=True)
    for number, table_ids in numbers:
        state.settle_number(client_id, number, table_ids)
