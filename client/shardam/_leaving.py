"""How a client says goodbye."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import embedding_pb2

if TYPE_CHECKING:
    from shardam._session import Session

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 5.0
"""Saying goodbye is a courtesy, home closes silent clients by itself; it has to reach every other shard before it answers."""


def leave(session: Session) -> None:
    """Tells home, which closes the client on all shards."""
    home = session.links[0]
    request = embedding_pb2.LeaveRequest(header=session.header(home, 0, LEAVE_TIMEOUT_S))
    try:
        home.call(lambda link: link.embedding.Leave, request, LEAVE_TIMEOUT_S)
    except ShardamError as error:
        logger.warning(
            "home could not be told that client %s leaves; it closes it after %g s of silence: %s",
            session.client_id.hex(),
            session.client_lease_s,
            error,
        )
