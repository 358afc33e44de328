"""SIGKILL of a shard at a chosen moment of a group's step: the proxies keep messages back, so the step stands still there.

What is kept back proves how far the step has come: home answers with a result only once the decision is in its journal.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.plans import Phase
from shardam_testing.waiting import wait_for

HOME = 0

AHEAD = 3
"""Steps from the last one that a member has noted to the one that is kept back: so many have not begun yet."""

PHASE_TIMEOUT_S = 90.0
"""A step takes milliseconds; a shard that was killed before may still be starting, in 1 to 3 s on an idle machine."""

ALL = 1_000_000
"""Connections that a hold spares which only watches."""

Reached = Callable[[], bool]


def kill_in_phase(cluster: FaultCluster, phase: Phase, index: int) -> int:
    """Waits until a step of the cluster's sync group is in a phase, kills a shard there, and lets the step go on.

    Args:
        cluster: a cluster whose proxies read messages, with two or more members at work.
        phase: how far the step has come.
        index: the shard; the cluster's keeper starts it again.

    Returns:
        The step.

    Raises:
        AssertionError: the phase did not come in time, or the shard was not alive.
    """
    cluster.wait_ready()
    with _kept_back(cluster, phase, index) as (step, reached):
        wait_for(f"step {step} to be in phase {phase.value!r}", reached, PHASE_TIMEOUT_S)
        assert cluster.signal(index, signal.SIGKILL), f"shard {index} was not alive"
        return step


@contextlib.contextmanager
def _kept_back(cluster: FaultCluster, phase: Phase, index: int) -> Iterator[tuple[int, Reached]]:
    """Keeps the messages back that would take a step out of a phase, before the step begins."""
    ahead = AHEAD
    try:
        while True:
            before = cluster.members.last_step
            step = before + ahead
            reached = _hold(cluster, phase, index, step)
            if cluster.members.last_step < step - 1:
                break
            _release(cluster)
            ahead *= 2
        yield step, reached
    finally:
        _release(cluster)


def _hold(cluster: FaultCluster, phase: Phase, index: int, step: int) -> Reached:
    home, peers = cluster.proxies[HOME], cluster.proxies[1:]
    match phase:
        case Phase.STAGED:
            arrivals = home.hold("arrive", step)
            return lambda: bool(arrivals.held)
        case Phase.ARRIVED:
            arrivals = home.hold("arrive", step, pass_first=1)
            return lambda: bool(arrivals.held) and bool(arrivals.passed)
        case Phase.DECIDED:
            for peer in peers:
                peer.hold("update", step)
            results = home.hold("result", step)
            return lambda: bool(results.held)
        case Phase.HALF if peers:
            return _half_of_peers(cluster, index, step)
    half = home.hold("result", step, pass_first=len(cluster.members.started) // 2)
    return lambda: bool(half.held) and bool(half.passed)


def _half_of_peers(cluster: FaultCluster, index: int, step: int) -> Reached:
    """Keeps half of the peers, the one to be killed first of all, from hearing of the decision; the others confirm it."""
    peers = sorted(range(1, cluster.num_shards), key=lambda peer: peer != index)
    num_late = max(len(peers) // 2, 1)
    late = [cluster.proxies[peer].hold("update", step) for peer in peers[:num_late]]
    told = [cluster.proxies[peer].hold("updated", step, pass_first=ALL) for peer in peers[num_late:]]
    return lambda: all(hold.held for hold in late) and all(hold.passed for hold in told)


def _release(cluster: FaultCluster) -> None:
    for proxy in cluster.proxies:
        proxy.release()
