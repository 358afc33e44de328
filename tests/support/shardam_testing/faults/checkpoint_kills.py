"""SIGKILL of home, of another shard or of the caller at a chosen moment of a checkpoint or of a restore.

The proxies keep messages between home and the others back, so that the job stands still in its phase until the kill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import signal
import time
from collections.abc import Callable, Iterator
from typing import Literal

from shardam_proto.registry import Keys
from shardam_testing.faults.checkpoint_callers import Caller
from shardam_testing.faults.checkpoint_files import MANIFEST
from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.network_faults import MessageKind
from shardam_testing.waiting import wait_for

Victim = Literal["home", "peer", "last", "caller"]

VICTIMS: tuple[Victim, ...] = ("home", "peer", "last", "caller")
"""Home; a shard that is ahead of the last one in phases that are half through; the last one; the process that asked."""

INDEXES: dict[Victim, int] = {"home": 0, "peer": 1, "last": 2}

NUM_SHARDS = 3
"""Home and two others, so that one of them can be ahead of the other."""

ALL = 1_000_000
"""Connections that a hold spares which only watches."""

PHASE_TIMEOUT_S = 60.0
"""A job of the tests is through its phases in a second; the process that asks for it takes one to start."""

CALLER_TIMEOUT_S = 150.0
"""A caller goes on until its job has ended, or home has died."""

LOOK_S = 0.0005
"""How often the folder is looked at for the manifest: home writes it within a few milliseconds."""


class JobPhase(enum.Enum):
    """How far a checkpoint or a restore has come."""

    HELD = "all hold, none is cut but home"
    HALF_CUT = "cut on some"
    WRITING = "written, home has not heard of it"
    HALF_WRITTEN = "written by some, as home knows"
    MANIFEST = "the manifest is being written"
    COMPLETE = "the manifest is there, older ones go"
    CHECKING = "files are checked on some"
    COMMITTED = "decided, nobody told"
    HALF_ADOPTED = "some are told"
    LOADED = "some have loaded"


CHECKPOINT_PHASES = (
    JobPhase.HELD,
    JobPhase.HALF_CUT,
    JobPhase.WRITING,
    JobPhase.HALF_WRITTEN,
    JobPhase.MANIFEST,
    JobPhase.COMPLETE,
)
RESTORE_PHASES = (JobPhase.CHECKING, JobPhase.COMMITTED, JobPhase.HALF_ADOPTED, JobPhase.LOADED)

Reached = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class JobKill:
    """Who is killed, and when."""

    phase: JobPhase
    victim: Victim


ALL_KILLS = tuple(JobKill(phase, victim) for phase in JobPhase for victim in VICTIMS)
"""Each victim in each phase: 40."""


def kill_in_job(cluster: FaultCluster, kill: JobKill, name: str = "") -> None:
    """Begins a job, waits until it is in a phase, kills there, lets the rest go on, and waits until all shards serve.

    Args:
        cluster: of three shards, whose proxies read messages.
        kill: of a phase of a checkpoint: one is made; of a restore: one is restored.
        name: name of the checkpoint; of one that is made, empty: home names it, and deletes it when it is one too many.

    Raises:
        AssertionError: the phase did not come in time, or the victim was not alive.
    """
    cluster.wait_ready()
    what = "create" if kill.phase in CHECKPOINT_PHASES else "restore"
    with _caller(cluster, what, name) as caller:
        with _kept_back(cluster, kill.phase) as reached:
            caller.start()
            _poll(f"a job in phase {kill.phase.value!r}", reached, caller)
            if kill.victim == "caller":
                caller.kill()
            else:
                assert cluster.signal(INDEXES[kill.victim], signal.SIGKILL), f"shard {INDEXES[kill.victim]} was not alive"
        wait_for("the caller to end", lambda: caller.ended, CALLER_TIMEOUT_S)
    wait_served(cluster)


def _poll(what: str, reached: Reached, caller: Caller) -> None:
    """Waits for a phase, so closely that it is not over when it has been seen.

    Raises:
        AssertionError: the caller ended before, or it took too long.
    """
    deadline = time.monotonic() + PHASE_TIMEOUT_S
    while not reached():
        assert not caller.ended or reached(), f"the caller ended before {what}:\n{caller.log.read_text()[-2000:]}"
        assert time.monotonic() < deadline, f"waited {PHASE_TIMEOUT_S:g} s for {what}"
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _caller(cluster: FaultCluster, what: str, name: str) -> Iterator[Caller]:
    """Makes a caller, which does not outlive the block."""
    caller = Caller(cluster, what, name)
    try:
        yield caller
    finally:
        caller.kill()


@contextlib.contextmanager
def _kept_back(cluster: FaultCluster, phase: JobPhase) -> Iterator[Reached]:
    """Keeps the messages back that would take a job out of a phase."""
    try:
        yield _hold(cluster, phase)
    finally:
        for proxy in cluster.proxies:
            proxy.release()


def _hold(cluster: FaultCluster, phase: JobPhase) -> Reached:
    match phase:
        case JobPhase.HELD:
            return _before(cluster, "cut")
        case JobPhase.HALF_CUT:
            return _half(cluster, "cut")
        case JobPhase.WRITING:
            return _before(cluster, "written")
        case JobPhase.HALF_WRITTEN:
            return _half(cluster, "written")
        case JobPhase.CHECKING:
            return _half(cluster, "check")
        case JobPhase.COMMITTED:
            return _before(cluster, "adopt")
        case JobPhase.HALF_ADOPTED:
            return _half(cluster, "adopt")
        case JobPhase.LOADED:
            return _loaded(cluster)
        case JobPhase.MANIFEST:
            return _new_files(cluster, f"{MANIFEST}*")
        case JobPhase.COMPLETE:
            return _new_files(cluster, MANIFEST)


def _new_files(cluster: FaultCluster, pattern: str) -> Reached:
    """A file of this name in a folder that no checkpoint has yet."""
    root = cluster.checkpoint_folder("")
    before = set(root.glob("*"))
    return lambda: any(path.parent not in before for path in root.glob(f"*/{pattern}"))


def _before(cluster: FaultCluster, kind: MessageKind) -> Reached:
    holds = [proxy.hold(kind, 0) for proxy in cluster.proxies[1:]]
    return lambda: any(hold.held for hold in holds)


def _half(cluster: FaultCluster, kind: MessageKind) -> Reached:
    *others, last = cluster.proxies[1:]
    held = last.hold(kind, 0)
    passed = [proxy.hold(kind, 0, pass_first=ALL) for proxy in others]
    return lambda: bool(held.held) and all(hold.passed for hold in passed)


def _loaded(cluster: FaultCluster) -> Reached:
    """A shard that has loaded a plan's checkpoint says so in Redis; the commit has taken the former lineages out."""
    adopted = [proxy.hold("adopt", 0, pass_first=ALL) for proxy in cluster.proxies[1:]]
    key, client = Keys(cluster.shards.cluster).lineages, cluster.valkey.client()
    return lambda: any(hold.passed for hold in adopted) and bool(client.hlen(key))


def wait_served(cluster: FaultCluster) -> None:
    """Waits until all shards serve after a kill."""
    wait_for("the killed shard to be started again", lambda: all(not _dead(cluster, index) for index in range(NUM_SHARDS)))
    cluster.wait_ready()


def _dead(cluster: FaultCluster, index: int) -> bool:
    return cluster.process(index).process.poll() is not None
