"""How a gone client's last numbers ended on each shard, and what a shard lacks of them (PROTOCOL.md, section 4)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from shardam_proto.errors import ClientClosed
from shardam_proto.v1 import shard_pb2
from shardam_server.shard.clients import ClientEntry, Origin, check_client_id
from shardam_server.shard.state import ShardState

HOME = 0
"""Index of the shard that closes clients."""

CLOSED_BY_HOME = b"closed by home"
"""Digest of a number that home closed for a client that was gone."""

PAGE_BYTES = 2**20
"""A page of ended clients is full at about this size: far below what a message may hold."""

Settlement = Mapping[int, tuple[int, ...]]
"""Numbers that a shard lacks, in order, each with the tables that stepped by it elsewhere."""


@dataclasses.dataclass(frozen=True)
class LastNumbers:
    """Where a client that takes no more changes stands on one shard.

    Attributes:
        last_number: its last closed number; zero: none, or the client is not known.
        tables: number -> tables that stepped by it here, for the numbers whose outcome is kept.
        settled: its numbers are equal on all shards already.
    """

    last_number: int = 0
    tables: Settlement = dataclasses.field(default_factory=dict)
    settled: bool = False

    @classmethod
    def of(cls, entry: ClientEntry | None) -> LastNumbers:
        """Reads a client's entry, on the sequencer's thread."""
        if entry is None:
            return cls()
        tables = {number: tuple(outcome.steps) for number, (_, outcome) in entry.outcomes.items()}
        return cls(entry.last_number, tables, entry.settled)

    @classmethod
    def from_message(cls, message: shard_pb2.EndClientResponse | shard_pb2.EndedClient) -> LastNumbers:
        """Reads another shard's answer; `settled` stands only in that about one client."""
        settled = isinstance(message, shard_pb2.EndClientResponse) and message.settled
        return cls(message.last_number, {closed.number: tuple(closed.table_ids) for closed in message.numbers}, settled)


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
        self._told: set[int] = set()
        self._settled_before = False

    def has_answered(self, shard: int) -> bool:
        """True: the client is ended there, and its numbers are known."""
        return shard in self._last

    def answer(self, shard: int, numbers: LastNumbers) -> None:
        """Notes where the client stands on a shard. One that knows it as settled means that no shard lacks a number."""
        self._last[shard] = numbers.last_number
        self._settled_before |= numbers.settled
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
        self._told.discard(shard)

    def tell(self, shard: int) -> None:
        """Notes that a shard knows that the client is settled."""
        self._told.add(shard)

    def may_tell(self, shard: int) -> bool:
        """True: the shard is to be told now that the client is settled; home comes last, so that its word holds for all."""
        others = set(self._shards) - {HOME}
        return self.settled and shard not in self._told and (shard != HOME or others <= self._told)

    def lacking(self, shard: int) -> Settlement:
        """Returns the numbers that a shard lacks of those that shards have told so far, up to the first unknown one."""
        numbers: dict[int, tuple[int, ...]] = {}
        if shard not in self._last or self._settled_before:
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
        if self._settled_before:
            return {}
        behind = {shard: last for shard, last in self._last.items() if last < self._goal}
        return {shard: (last + 1, self._goal) for shard, last in sorted(behind.items())}

    def problems(self) -> list[str]:
        """Says which shards stay behind."""
        return [
            f"numbers {first} to {last} of client {self.client_id.hex()} are missing on shard {shard}, and no shard remembers "
            "all of them: its table steps stay behind those of other shards"
            for shard, (first, last) in self.unknown().items()
        ]

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
    return LastNumbers.of(state.end_client(client_id, remember=True))


def end_all_here(state: ShardState, after_client_id: bytes) -> tuple[list[shard_pb2.EndedClient], bytes]:
    """Ends all clients on this shard; on the sequencer's thread.

    Returns:
        A page of those behind a client whose numbers may be unequal on other shards, by id; and where the next page begins,
        or nothing.

    Raises:
        JournalFailed, JournalFull: it could not be recorded of one; it may be repeated.
    """
    for client_id, entry in list(state.clients):
        if not entry.closed:
            state.end_client(client_id)
    page: list[shard_pb2.EndedClient] = []
    size = 0
    for client_id, entry in sorted(state.clients, key=lambda client: client[0]):
        if client_id <= after_client_id or entry.is_over:
            continue
        if size > PAGE_BYTES:
            return page, page[-1].client_id
        numbers = closed_numbers(LastNumbers.of(entry).tables)
        page.append(shard_pb2.EndedClient(client_id=client_id, last_number=entry.last_number, numbers=numbers))
        size += page[-1].ByteSize()
    return page, b""


def settle_number(state: ShardState, client_id: bytes, number: int, table_ids: Sequence[int]) -> None:
    """Closes an ended client's next number as home says (VOID); one that is closed already is passed over.

    Raises:
        ClientClosed: the client is not known, is still open, or lacks numbers before this one.
        UnknownTable: a table is not known.
    """
    entry = state.clients.find(client_id)
    if entry is None or not entry.closed or number > entry.last_number + 1:
        place = "not known" if entry is None else f"at number {entry.last_number}" if entry.closed else "still open"
        raise ClientClosed(
            f"client {client_id.hex()} is {place} here, so its number {number} cannot be settled", reason="UNKNOWN_CLIENT"
        )
    if number == entry.last_number + 1:
        state.void(table_ids, Origin(client_id, number, CLOSED_BY_HOME))


def settle_here(
    state: ShardState, client_id: bytes, numbers: Iterable[tuple[int, tuple[int, ...]]], *, settled: bool = False
) -> None:
    """Closes numbers that other shards have, in order; on the sequencer's thread. Those closed already are passed over.

    A client that is not known here takes them all the same, and is remembered as closed. One that is settled takes none: this
    shard may have started empty, with the table steps of its numbers.

    Args:
        state: the shard's state.
        client_id: the client.
        numbers: its numbers that are missing here, with the tables that stepped.
        settled: its numbers are equal on all shards then.

    Raises:
        ClientClosed: numbers before the first are missing.
        UnknownTable: a table is not known; the numbers before it are closed.
        JournalFailed, JournalFull: a number could not be recorded; the numbers before it are closed.
    """
    check_client_id(client_id)
    entry = state.end_client(client_id, remember=True)
    if entry is not None and entry.settled:
        return
    for number, table_ids in numbers:
        settle_number(state, client_id, number, table_ids)
    if settled:
        state.end_client(client_id, settled=True)
