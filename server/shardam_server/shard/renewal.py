"""Keeping the name: ticks and renewals, each on a thread of its own so that nothing else delays them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardam_proto.errors import RedisUnreachable
from shardam_server.shard.registration import Lease
from shardam_server.shard.tenure import Tenure

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 6
"""Five renewals may fail before the name is free for another, and a tick may be late by a third of a lease (tenure.py)."""


class Renewal:
    """Ticks and renews until it is stopped or another process has the name.

    The ticks have a thread apart: a Redis that answers slowly is no pause of this process.

    Args:
        tenure: told of every tick; fenced when the name is lost.
        renew: asks Redis once.
        lease_s: how long a name outlives its last renewal.
        end: called once, from a thread, when another process has the name or the thread failed.
    """

    def __init__(self, tenure: Tenure, renew: Callable[[], Lease], lease_s: float, end: Callable[[], None]) -> None:
        self._tenure = tenure
        self._renew = renew
        self._period_s = lease_s / RENEWALS_PER_LEASE
        self._end = end
        self._stopped = threading.Event()
        self._reachable = True
        self._same_cluster = True

    def start(self) -> None:
        """Starts both threads; the name has just been taken."""
        for name, loop in (("tenure", self._tick_forever), ("renewal", self._renew_forever)):
            threading.Thread(target=loop, name=name, daemon=True).start()

    def stop(self) -> None:
        """Starts no further renewal; one that is under way is not waited for."""
        self._stopped.set()

    def _tick_forever(self) -> None:
        self._tenure.tick()
        while not self._stopped.wait(self._period_s):
            self._tenure.tick()

    def _renew_forever(self) -> None:
        try:
            while not self._stopped.wait(self._period_s):
                if not self._renew_once():
                    return
        except Exception:
            logger.exception("cannot renew the shard's name any more; stopping")
            self._tenure.fence()
            self._end()

    def _renew_once(self) -> bool:
        """Returns False if another process has the name."""
        suspended = self._tenure.suspended
        try:
            lease = self._renew()
        except RedisUnreachable as error:
            if self._reachable:
                logger.warning("%s; pulls and pushes go on, creating tables and new connections wait", error.message)
            self._reachable = False
            return True
        if not self._reachable:
            logger.info("Redis answers again")
        self._reachable = True
        if lease in (Lease.TAKEN, Lease.OTHER_LINEAGE, Lease.BEHIND):
            self._tenure.fence()
            logger.error(
                "another process has taken this shard's name in Redis (%s): fenced, nothing more is applied; stopping",
                lease.value,
            )
            self._end()
            return False
        if lease is Lease.OTHER_CLUSTER and self._same_cluster:
            logger.error(
                "Redis knows another cluster by this cluster's name: this shard is not registered any more and serves only "
                "those who know it. Stop it, or the other cluster, or give one of them another --cluster name"
            )
        self._same_cluster = lease is not Lease.OTHER_CLUSTER
        if suspended and lease is Lease.HELD:
            logger.warning("was paused beyond half of its lease; Redis confirms its name, so it goes on")
        return True
