"""What a shard remembers of each client: its last number and that number's outcome (PROTOCOL.md, section 4)."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from shardam_proto.errors import BadOption, ClientClosed, QueueFull, SequenceError, StaleState

MAX_CLIENTS = 65_536
"""Client entries a shard keeps; an entry is about 400 bytes."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a number ended here.

    Attributes:
        steps: table id -> its step after the change, for the tables that stepped.
        num_rows: rows written, deleted or cleared, for row changes.
        change_number: the shard's change number of the change, for row changes.
    """

    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    num_rows: int = 0
    change_number: int = 0


@dataclasses.dataclass
class ClientEntry:
    """One client.

    Attributes:
        last_number: its last closed number.
        digest: digest of that number's content.
        outcome: how that number ended, answered again to a repeat.
        closed: it has left.
    """

    last_number: int = 0
    digest: bytes = b""
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    closed: bool = False


class Clients:
    """All clients of a shard. Used from the sequencer's thread alone."""

    def __init__(self, max_clients: int = MAX_CLIENTS) -> None:
        self._entries: collections.OrderedDict[bytes, ClientEntry] = collections.OrderedDict()
        self._max_clients = max_clients
        self._num_open = 0

    def __len__(self) -> int:
        """Number of clients that have opened and not left."""
        return self._num_open

    def open(self, client_id: bytes) -> ClientEntry:
        """Registers a client, or returns the entry of a known one.

        Raises:
            BadOption: no client id.
            ClientClosed: it has left.
            QueueFull: too many clients.
        """
        if not client_id:
            raise BadOption("Open needs a client_id of 16 random bytes")
        entry = self._entries.get(client_id)
        if entry is None:
            self._make_room()
            entry = self._entries[client_id] = ClientEntry()
            self._num_open += 1
        if entry.closed:
            raise ClientClosed(f"client {client_id.hex()} has left; connect again", reason="CLIENT_CLOSED")
        return entry

    def _make_room(self) -> None:
        if len(self._entries) < self._max_clients:
            return
        for client_id, entry in self._entries.items():
            if entry.closed:
                del self._entries[client_id]
                return
        raise QueueFull(f"the shard keeps at most {self._max_clients} clients; close clients that are not needed")

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
            raise ClientClosed(f"client {client_id.hex()} has left; connect again", reason="CLIENT_CLOSED")
        return entry

    def leave(self, client_id: bytes) -> None:
        """Closes a client. Its id stays known as closed until room is needed; an unknown id is left as it is."""
        entry = self._entries.get(client_id)
        if entry is not None and not entry.closed:
            self._entries[client_id] = ClientEntry(last_number=entry.last_number, closed=True)
            self._num_open -= 1

    def run_number(self, client_id: bytes, number: int, digest: bytes, change: Callable[[], Outcome]) -> tuple[Outcome, bool]:
        """Runs a numbered change once.

        Args:
            client_id: the client.
            number: the change's number.
            digest: digest of its content.
            change: applies it, or raises and leaves everything as it was; the number then stays open.

        Returns:
            The outcome, and whether it is the former outcome of a repeat.

        Raises:
            ClientClosed: the client is unknown or has left.
            StaleState: numbers before this one are missing (SEQUENCE_GAP).
            SequenceError: the number was used with another content, or is too old.
        """
        entry = self.get(client_id)
        metadata = {"last": str(entry.last_number), "number": str(number)}
        if number == entry.last_number + 1:
            outcome = change()
            entry.last_number, entry.digest, entry.outcome = number, digest, outcome
            return outcome, False
        if number > entry.last_number:
            message = f"number {number} came after {entry.last_number}; send {entry.last_number + 1} first"
            raise StaleState(message, reason="SEQUENCE_GAP", metadata=metadata)
        if number < entry.last_number or number <= 0:
            raise SequenceError(
                f"number {number} is too old: the last one is {entry.last_number}, and only its outcome is kept",
                reason="SEQUENCE_EXPIRED",
                metadata=metadata,
            )
        if digest != entry.digest:
            raise SequenceError(
                f"number {number} was used with another content; a change needs a number of its own",
                reason="SEQUENCE_REUSED",
                metadata=metadata,
            )
        return entry.outcome, True
