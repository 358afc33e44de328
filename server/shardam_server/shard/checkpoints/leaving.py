"""The end of a shard process whose state has moved to another number of shards."""

from __future__ import annotations

import asyncio
import logging

from shardam_proto.errors import ShardNotReady
from shardam_proto.registry import Plan
from shardam_server.command_errors import Resharded
from shardam_server.shard.context import ShardContext

logger = logging.getLogger(__name__)


class Leaving:
    """Ends this process once a plan moves its state to other shards. Used on the event loop.

    Args:
        shard: the shard.
        cluster: name of the cluster.

    Attributes:
        begun: set once it is to end.
    """

    def __init__(self, shard: ShardContext, cluster: str) -> None:
        self.begun = asyncio.Event()
        self._shard = shard
        self._cluster = cluster
        self._plan: Plan | None = None

    def concerns(self, plan: Plan) -> bool:
        """Whether a plan ends this process: it is of a later route epoch, so that others serve its rows."""
        route_map = self._shard.identity.route_map
        return route_map is not None and plan.epoch > route_map.epoch

    def begin(self, plan: Plan) -> None:
        """Applies nothing more, and has the process end."""
        if self.begun.is_set():
            return
        index = self._shard.identity.index
        logger.info("the state has moved to %d shards (epoch %d): shard %d ends", plan.num_shards, plan.epoch, index)
        self._plan = plan
        error = ShardNotReady(
            f"shard {index} ends: its rows have moved to {plan.num_shards} shards, which start; try again",
            metadata={"shard": str(index)},
        )
        self._shard.holding.refuse(error)
        self.begun.set()

    def check(self) -> None:
        """Says why the process has ended, and what to start.

        Raises:
            Resharded: it had to.
        """
        if self._plan is None:
            return
        index, count, folder = self._shard.identity.index, self._plan.num_shards, self._shard.kept.folder
        last = f"shards 0 to {count - 1}" if count > 1 else "shard 0"
        message = f"cluster {self._cluster!r} has moved to {count} shards: start {last} with --shards {count}"
        if index >= count:
            kept = "" if folder is None else f", and {folder} may be deleted once they serve"
            message += f"; there is no shard {index} any more{kept}"
        raise Resharded(message)
