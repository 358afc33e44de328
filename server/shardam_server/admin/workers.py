"""Reads the workers from home, in an order that pages can follow while workers come and go."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Self

from shardam_proto.errors import BadOption
from shardam_proto.v1 import shard_pb2
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.worker_words import worker_order

HOME = 0
"""Index of the shard that knows the workers."""

_PLACE = re.compile(r"(?P<rank>[0-9]{1,10}):(?P<client_id>(?:[0-9a-f]{2})*):(?P<group>[A-Za-z0-9_.-]*)")


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in the list: right after a worker, who need not be there any more.

    Attributes:
        group: its group; empty: none.
        rank: its rank there.
        client_id: its client.
    """

    group: str
    rank: int
    client_id: bytes

    @classmethod
    def of(cls, worker: shard_pb2.Worker) -> Self:
        """Returns the place after a worker."""
        return cls(worker.group, worker.rank, worker.client_id)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text of a place.

        Raises:
            BadOption: it is none.
        """
        match = _PLACE.fullmatch(text)
        if match is None:
            raise BadOption(
                f"cursor {text[:40]!r} is none of this list's; pass next_cursor of the page before, or none",
                metadata={"cursor": text[:40]},
            )
        return cls(match["group"], int(match["rank"]), bytes.fromhex(match["client_id"]))

    def __str__(self) -> str:
        return f"{self.rank}:{self.client_id.hex()}:{self.group}"

    @property
    def order(self) -> tuple[bool, str, int, bytes]:
        """Where it stands among workers, as worker_order."""
        return not self.group, self.group, self.rank, self.client_id


@dataclasses.dataclass(frozen=True)
class WorkerPage:
    """A page of workers.

    Attributes:
        workers: members by group and rank, then async workers.
        waiting: all groups that wait for ranks.
        next_place: where the next page starts; None: this was the last.
    """

    workers: Sequence[shard_pb2.Worker]
    waiting: Sequence[shard_pb2.WaitingGroup]
    next_place: Place | None


def read_workers(calls: ShardCalls, after: Place | None, limit: int, request_id: int) -> WorkerPage:
    """Reads a page of workers.

    Args:
        calls: reaches home.
        after: where the page starts; None: at the beginning.
        limit: workers of the page at most.
        request_id: for home's log.

    Raises:
        ShardamError: home did not answer or refused; VersionMismatch: it is too old to list workers.
    """
    answer = calls.call(HOME, lambda stubs: stubs.shard.ListWorkers, shard_pb2.ListWorkersRequest(), request_id)
    workers = sorted(answer.workers, key=worker_order)
    rest = workers if after is None else [worker for worker in workers if worker_order(worker) > after.order]
    page = rest[:limit]
    return WorkerPage(page, answer.waiting, Place.of(page[-1]) if len(page) < len(rest) else None)
