"""A hold under which the state moves to other shards, on the shard that is held (PROTOCOL.md, section 8).

Whether the state has moved is decided in Redis, by home, while all shards are held. A shard whose hold runs out may therefore
not go on by itself: it has Redis decide first that nothing moves under this hold any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import Plan
from shardam_server.shard.holding import Holding
from shardam_server.shard.identity import ShardIdentity

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
"""Waits between two questions double from the first to the longest: a short outage costs little, a long one little traffic."""


class FinalHolds:
    """What a shard does when a final hold runs out. Used on the event loop.

    Args:
        identity: whose state is held.
        holding: its gate.
        end_move: has Redis decide no plan any more under a hold, and returns the last plan that was decided; blocking.
        adopt: told of a plan that is ahead of this shard's state.
    """

    def __init__(
        self,
        identity: ShardIdentity,
        holding: Holding,
        end_move: Callable[[int], Plan | None],
        adopt: Callable[[Plan], None],
    ) -> None:
        self._identity = identity
        self._holding = holding
        self._end_move = end_move
        self._adopt = adopt
        self._asking: set[asyncio.Task[None]] = set()

    def final_hold_expired(self, hold_id: int) -> None:
        """Releases a final hold that has run out, or takes over the plan that was decided under it; never both."""
        task = asyncio.create_task(self._ask(hold_id))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def stop(self) -> None:
        """Asks no more; the hold stays."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _ask(self, hold_id: int) -> None:
        logger.warning("a hold for a move to other shards ran out: changes wait until Redis says whether the state has moved")
        wait_s = FIRST_WAIT_S
        while self._holding.hold_id == hold_id:
            try:
                plan = await asyncio.to_thread(self._end_move, hold_id)
            except RedisUnreachable as error:
                logger.warning("%s; changes wait", error.message)
                await asyncio.sleep(wait_s)
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s)
                continue
            if plan is not None and self._is_ahead(plan):
                self._adopt(plan)
            else:
                logger.warning("the state has not moved: changes go on")
                self._holding.release(hold_id)
            return

    def _is_ahead(self, plan: Plan) -> bool:
        route_map = self._identity.route_map
        return plan.is_ahead_of(self._identity.timeline, 0 if route_map is None else route_map.epoch)
