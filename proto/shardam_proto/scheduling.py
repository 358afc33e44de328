"""How the system schedules gRPC's threads beside those that compute.

By default Linux stops a thread that computes as soon as another one of the same core has something to do. A message of some MB
wakes its receiver a dozen times, so a process that trains or applies one message while the next comes in loses up to a tenth of
its time to that. A thread that is scheduled as a batch waits for a pause, or for its turn after some milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def starting_batch_threads() -> Iterator[None]:
    """Threads that are started in the block, and those that they start, are scheduled as a batch; this one is as before.

    Nothing is changed on other systems than Linux, where the system refuses it, and in a thread for which somebody has chosen
    another policy than the default.
    """
    changed = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER and _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if changed:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> bool:
    try:
        os.sched_setscheduler(0, policy, os.sched_param(0))  # of the calling thread
    except OSError as error:
        logger.debug("the system refuses scheduling policy %d: %s", policy, error)
        return False
    return True
