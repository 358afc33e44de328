"""The end of a shard process whose state moves to another number of shards, and what those do with what it leaves."""

from __future__ import annotations

import asyncio
import logging

from shardam_proto.errors import ShardNotReady
from shardam_proto.registry import Plan
from shardam_server.command_errors import Resharded
from shardam_server.settings import ShardSettings
from shardam_server.shard.checkpoints.left_folders import remove_left_folders
from shardam_server.shard.context import ShardContext

logger = logging.getLogger(__name__)


class Leaving:
    """Ends this process once a plan moves its state to other shards. Used on the event loop.

    Args:
        shard: the shard.
        settings: its settings.

    Attributes:
        begun: set once it is to end.
    """

    def __init__(self, shard: ShardContext, settings: ShardSettings) -> None:
        self.begun = asyncio.Event()
        self._shard = shard
        self._settings = settings
        self._plan: Plan | None = None

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

    def end_hold(self) -> None:
        """Ends a hold because this process ends; what a final one keeps back may be others' to apply, and is refused."""
        holding, index = self._shard.holding, self._shard.identity.index
        if holding.is_final:
            holding.refuse(ShardNotReady(f"shard {index} is draining while its state moves; try again"))
        else:
            holding.release(holding.hold_id)

    async def clear_up(self) -> None:
        """Removes folders whose rows have moved, once all shards serve that they have moved to."""
        identity, data_dir = self._shard.identity, self._settings.data_dir
        if data_dir is not None:
            cluster, route_map = identity.require_cluster(), identity.require_route_map()
            await asyncio.to_thread(remove_left_folders, data_dir, self._settings.cluster, cluster.cluster_id, route_map)

    def check(self) -> None:
        """Says why the process has ended, and what to start.

        Raises:
            Resharded: it had to.
        """
        if self._plan is None:
            return
        index, count, folder = self._shard.identity.index, self._plan.num_shards, self._shard.kept.folder
        last = f"shards 0 to {count - 1}" if count > 1 else "shard 0"
        message = f"cluster {self._settings.cluster!r} has moved to {count} shards: start {last} with --shards {count}"
        if index >= count:
            kept = "" if folder is None else f", and {folder} may be deleted once they serve"
            message += f"; there is no shard {index} any more{kept}"
        raise Resharded(message)
