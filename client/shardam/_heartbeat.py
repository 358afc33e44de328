"""The thread that tells home that this client lives, whatever its other threads wait for (PROTOCOL.md, section 4)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardam._backoff import Backoff
from shardam._calls import ShardCall
from shardam._link import ShardLink
from shardam._recovery import recover
from shardam_proto.errors import ShardamError
from shardam_proto.v1 import embedding_pb2

if TYPE_CHECKING:
    from shardam._session import Session

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 3
"""Home closes a client after client_lease_s of silence: two beats may be lost before."""


class Heartbeat:
    """Calls Heartbeat on home until the client ends.

    Args:
        session: the client, opened on all shards.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._interval_s = session.client_lease_s / BEATS_PER_LEASE

    def run(self) -> None:
        """Beats; a lost beat is sent again with back-off."""
        backoff, wait_s = Backoff(), self._interval_s
        while not self._session.over.wait(wait_s):
            home = self._session.links[0]
            incarnation = home.incarnation
            try:
                beat = ShardCall(home, lambda link: link.embedding.Heartbeat, embedding_pb2.HeartbeatRequest())
                self._session.try_once(beat, min(self._interval_s, self._session.try_s))
            except ShardamError as error:
                if self._session.ended:
                    return
                if not backoff.num_waits:
                    logger.warning("home did not take a sign of life, trying again: %s", error)
                hurry = self._come_back(home, error, incarnation)
                wait_s = min(backoff.next_s(hurry=hurry), self._interval_s)
            else:
                backoff, wait_s = Backoff(), self._interval_s

    def _come_back(self, home: ShardLink, error: ShardamError, incarnation: int) -> bool:
        try:
            return recover(self._session, home, error, incarnation).hurry
        except ShardamError as problem:
            logger.debug("home cannot be found again yet: %s", problem)
            return False
