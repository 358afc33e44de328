"""How a benchmark talks to a server that pulls and pushes: requests in a row, several in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from batches import Float32s, Int64s

IN_FLIGHT = 2
"""Requests that are on their way at a time."""

SentT = TypeVar("SentT")


class Lane(Protocol):
    """A connection. Answers come in the order of the requests."""

    def send_pull(self, row_ids: Int64s) -> None:
        """Asks for weights."""
        ...

    def take_pull(self) -> object:
        """Waits for the oldest pull; returns its weights, float32 [N, dim]."""
        ...

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        """Sends gradients."""
        ...

    def take_push(self) -> object:
        """Waits until the oldest push is applied."""
        ...


def keep_in_flight(requests: Iterable[SentT], send: Callable[[SentT], object], take: Callable[[], object]) -> None:
    """Sends all requests, IN_FLIGHT at a time, and waits for all answers."""
    waiting = 0
    for request in requests:
        if waiting == IN_FLIGHT:
            take()
            waiting -= 1
        send(request)
        waiting += 1
    for _ in range(waiting):
        take()
