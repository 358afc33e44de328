"""The rules of numbers on one shard (PROTOCOL.md, section 4), written to be read: what a shard is held against."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardam_proto.schema import TableSpec
from shardam_server.shard.clients import WINDOW, Outcome
from shardam_testing.reference_table import ReferenceTable
from shardam_testing.shard_states import SEED


@dataclasses.dataclass
class ModelClient:
    """What section 4 says that a shard knows of a client."""

    heartbeats: bool = False
    last: int = 0
    closed: bool = False
    settled: bool = False
    window: dict[int, tuple[bytes, Outcome]] = dataclasses.field(default_factory=dict)

    def close_number(self, digest: bytes, outcome: Outcome) -> None:
        self.last += 1
        self.window[self.last] = digest, outcome
        self.window = {number: ended for number, ended in self.window.items() if number > self.last - WINDOW}


class Model:
    """The rules: whom a number is taken from, which one, and what a repeat is answered."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self.clients: dict[bytes, ModelClient] = {}
        self.tables = {table_id: ReferenceTable(spec, SEED) for table_id, spec in enumerate(specs, 1)}

    def verdict(self, client_id: bytes, number: int, digest: bytes) -> str:
        """Returns "apply", "repeat", or the reason of the refusal."""
        client = self.clients.get(client_id)
        if client is None:
            return "UNKNOWN_CLIENT"
        if client.closed:
            return "CLIENT_CLOSED"
        if number > client.last:
            return "apply" if number == client.last + 1 else "SEQUENCE_GAP"
        if number not in client.window:
            return "SEQUENCE_EXPIRED"
        return "repeat" if client.window[number][0] == digest else "SEQUENCE_REUSED"

    def next_number(self, client_id: bytes) -> int:
        client = self.clients.get(client_id)
        return 1 if client is None else client.last + 1

    def step(self, table_ids: list[int]) -> dict[int, int]:
        """Steps tables without a gradient."""
        for table_id in table_ids:
            self.tables[table_id].t += 1
        return {table_id: self.tables[table_id].t for table_id in table_ids}
