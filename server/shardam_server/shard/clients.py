"""What a shard remembers of each client: its last numbers and how they ended (PROTOCOL.md, section 4)."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator

from shardam_proto.errors import BadOption, ClientClosed, QueueFull, SequenceError, StaleState
from shardam_server.shard.groups.values import StepResult

MAX_CLIENTS = 65_536
"""Client entries a shard keeps by default; an entry is about 400 bytes, and 200 more for each number it remembers."""

WINDOW = 64
"""Numbers of a client whose outcome is kept; twice what a client may have in flight."""

ANY_CONTENT = b"any content"
"""Digest of a number that was closed where its content was not known: whatever is sent with it is taken for its repeat."""

IDLE_S = 24 * 3600.0
"""Time without contact after which an entry is forgotten."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Which client's which number a change is.

    Attributes:
        client_id: the client.
        number: its number, from 1.
        digest: digest of the change's content.
        clock: of a push in a bounded group, applied or not: the client's clock after it; zero: none.
    """

    client_id: bytes
    number: int
    digest: bytes
    clock: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a number ended here.

    Attributes:
        steps: table id -> its step after the change, for the tables that stepped by this number alone.
        num_rows: rows written, deleted or cleared, for row changes.
        change_number: the shard's change number of the change, for row changes.
        result: how the step ended, for contributions to a step of a sync group.
    """

    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    num_rows: int = 0
    change_number: int = 0
    result: StepResult | None = None

    @property
    def came_too_late(self) -> bool:
        """True: its step was decided without it. The client closes such a number by hand where its part was refused; a shard
        that has closed it by then, because the part came once more, answers that as a repeat.
        """
        return self.result is not None and not self.result.num_contributions


@dataclasses.dataclass
class ClientEntry:
    """One client.

    Attributes:
        last_number: its last closed number.
        closed: it has left or was dropped: no more changes.
        settled: its numbers are equal on all shards.
        heartbeats: it sends heartbeats to home.
        outcomes: number -> (digest of its content, how it ended), of the last WINDOW numbers, in order.
        clock: its clock in a bounded group: pushes applied, skipped or voided, and what it joined with; zero: none yet.
        last_contact: time.monotonic() of its last request.
    """

    last_number: int = 0
    closed: bool = False
    settled: bool = False
    heartbeats: bool = False
    outcomes: dict[int, tuple[bytes, Outcome]] = dataclasses.field(default_factory=dict)
    clock: int = 0
    last_contact: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """True: closed, and no shard will be asked for its numbers any more; only then may the entry go.

        A shard that had forgotten numbers would be brought to them, and to their table steps, a second time.
        """
        return self.closed and (self.settled or not self.last_number)

    def record(self, origin: Origin, outcome: Outcome) -> None:
        """Closes the next number."""
        self.last_number = origin.number
        self.outcomes[origin.number] = origin.digest, outcome
        self.outcomes.pop(origin.number - WINDOW, None)
        self.clock = origin.clock or self.clock


class Clients:
    """All clients of a shard.

    Used from the sequencer's thread alone, but for `len`, `num_open`, `find`, `last_number`, `get` and `touch`.
    """

    def __init__(self, max_clients: int = MAX_CLIENTS) -> None:
        self._entries: collections.OrderedDict[bytes, ClientEntry] = collections.OrderedDict()
        self._max_clients = max_clients
        self._num_open = 0

    def __len__(self) -> int:
        """Number of entries, of closed clients too."""
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[bytes, ClientEntry]]:
        """Yields all entries, the oldest first."""
        return iter(self._entries.items())

    @property
    def num_open(self) -> int:
        """Clients that have opened and not left."""
        return self._num_open

    # -- questions

    def find(self, client_id: bytes) -> ClientEntry | None:
        """Returns a client's entry, closed or not, or None."""
        return self._entries.get(client_id)

    def last_number(self, client_id: bytes) -> int:
        """Returns a client's last closed number; 0: it has none, or is not known."""
        entry = self.find(client_id)
        return 0 if entry is None else entry.last_number

    def get(self, client_id: bytes) -> ClientEntry:
        """Returns an open client's entry.

        Raises:
            ClientClosed: unknown, or has left.
        """
        entry = self._entries.get(client_id)
        if entry is None:
            raise ClientClosed(
                f"client {client_id.hex() or '(none)'} is not known here; call Open first", reason="UNKNOWN_CLIENT"
            )
        if entry.closed:
            raise ClientClosed(f"client {client_id.hex()} has left or was dropped; connect again", reason="CLIENT_CLOSED")
        return entry

    def former(self, origin: Origin) -> Outcome | None:
        """Returns the outcome of a repeated number, or None if it is the client's next one.

        Raises:
            ClientClosed: the client is unknown or has left.
            StaleState: numbers before this one are missing (SEQUENCE_GAP).
            SequenceError: the number was used with another content, or its outcome is no longer kept.
        """
        entry = self.get(origin.client_id)
        last, number = entry.last_number, origin.number
        metadata = {"last": str(last), "number": str(number)}
        if number == last + 1:
            return None
        if number > last:
            message = f"number {number} came after {last}; send {last + 1} first"
            raise StaleState(message, reason="SEQUENCE_GAP", metadata=metadata)
        kept = entry.outcomes.get(number)
        if kept is None:
            raise SequenceError(
                f"number {number} is too old: the last one is {last}, and outcomes of {WINDOW} numbers are kept",
                reason="SEQUENCE_EXPIRED",
                metadata=metadata,
            )
        digest, outcome = kept
        if digest not in (origin.digest, ANY_CONTENT) and not outcome.came_too_late:
            raise number_reused(number, last)
        return outcome

    def idle(self, now: float) -> list[bytes]:
        """Returns clients without contact for IDLE_S that are over, or open and send no heartbeats."""
        return [
            client_id
            for client_id, entry in self._entries.items()
            if now - entry.last_contact > IDLE_S and (entry.is_over if entry.closed else not entry.heartbeats)
        ]

    def forgettable(self) -> bytes | None:
        """Returns the client that has to be forgotten to make room for another: the oldest that is over; None: there is room.

        Raises:
            QueueFull: too many clients that are open, or closed and not settled yet.
        """
        if len(self._entries) < self._max_clients:
            return None
        for client_id, entry in self._entries.items():
            if entry.is_over:
                return client_id
        raise QueueFull(
            f"the shard keeps at most {self._max_clients} clients; close clients that are not needed, start shards that are "
            "away (clients that ended are remembered until all shards agree on their numbers), or raise --max-clients"
        )

    def touch(self, client_id: bytes) -> None:
        """Notes contact with a client."""
        entry = self._entries.get(client_id)
        if entry is not None:
            entry.last_contact = time.monotonic()

    # -- changes; checked before, so that they cannot fail

    def add(self, client_id: bytes, *, heartbeats: bool) -> ClientEntry:
        """Adds a client that is not known."""
        entry = self._entries[client_id] = ClientEntry(heartbeats=heartbeats)
        self._num_open += 1
        return entry

    def put(self, client_id: bytes, entry: ClientEntry) -> None:
        """Adds a client as it was stored."""
        self._entries[client_id] = entry
        self._num_open += not entry.closed

    def end(self, client_id: bytes, *, settled: bool) -> None:
        """Closes a client; an unknown one is remembered as closed."""
        entry = self._entries.get(client_id)
        if entry is None:
            entry = self._entries[client_id] = ClientEntry(closed=True)
        elif not entry.closed:
            entry.closed = True
            self._num_open -= 1
        entry.settled = entry.settled or settled

    def forget(self, client_ids: Iterable[bytes]) -> None:
        """Drops entries."""
        for client_id in client_ids:
            entry = self._entries.pop(client_id, None)
            self._num_open -= entry is not None and not entry.closed


def number_reused(number: int, last: int) -> SequenceError:
    """Returns the error of a number that came with another content than before; last: the client's last closed number."""
    return SequenceError(
        f"number {number} was used with another content; a change needs a number of its own",
        reason="SEQUENCE_REUSED",
        metadata={"last": str(last), "number": str(number)},
    )


def check_client_id(client_id: bytes) -> None:
    """Refuses an empty client id.

    Raises:
        BadOption: no client id.
    """
    if not client_id:
        raise BadOption("Open needs a client_id of 16 random bytes")
