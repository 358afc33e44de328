"""Plays a plan of faults on a running cluster and counts what fired. One thread; the plan's moments are polled."""

from __future__ import annotations

import collections
import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from shardam_proto.errors import RedisUnreachable
from shardam_testing.faults.checkpoint_callers import Caller
from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.network_faults import Fired
from shardam_testing.faults.phase_kills import kill_in_phase
from shardam_testing.faults.plans import (
    Acknowledged,
    Action,
    AdminAction,
    CutAll,
    Elapsed,
    FlushRedis,
    JobAction,
    KillAdmin,
    KillInPhase,
    KillMember,
    KillRedis,
    KillShard,
    KillWorker,
    MakeCheckpoint,
    MemberAction,
    MoveToShards,
    Network,
    Planned,
    RedisAction,
    RestoreLatest,
    ShardAction,
    StartWorker,
    Stepped,
    StopAdmin,
    StopMember,
    StopRedis,
    StopShard,
    StopWorker,
    When,
    WorkerAction,
)
from shardam_testing.faults.traffic import ArmedFault
from shardam_testing.faults.workers import Worker
from shardam_testing.waiting import wait_for

POLL_S = 0.005
"""How often moments are looked at: less than a push at the pace of the tests."""

LOOK_S = 0.05
"""How often Redis is asked whether a shard serves that is to be killed."""

MANY = 1_000_000
"""Changes of a worker that trains until it is told to end."""

FINISH_TIMEOUT_S = 120.0
"""A plan that takes longer hangs."""


class Injector:
    """Plays one plan.

    Args:
        cluster: what is broken.
        plan: what, and when.
    """

    def __init__(self, cluster: FaultCluster, plan: Sequence[Planned]) -> None:
        self._cluster = cluster
        self._waiting = list(plan)
        self._undo: list[tuple[float, Action]] = []
        self._fired: list[Fired] = []
        self._armed: list[ArmedFault] = []
        self._callers: list[Caller] = []
        self._next_look = 0.0
        self._cancelled = threading.Event()
        self._failure: BaseException | None = None
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._play, name="injector", daemon=True)

    def start(self) -> None:
        """Begins the plan."""
        self._start = time.monotonic()
        self._thread.start()

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Waits until every fault of the plan has been played and every stopped process goes on.

        Raises:
            AssertionError: the plan did not end in time, or its thread failed.
        """
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"waited {timeout_s:g} s for the plan; left: {self._waiting}"
        if self._failure is not None:
            raise AssertionError(f"the plan failed: {self._failure!r}") from self._failure

    @property
    def anything_stopped(self) -> bool:
        """Whether a process is stopped or away now that the plan will bring back."""
        return bool(self._undo)

    def wait_armed(self, timeout_s: float) -> bool:
        """Waits for the network's faults to meet their byte; returns whether all have, in that time."""
        deadline = time.monotonic() + timeout_s
        return all(armed.fired.wait(max(deadline - time.monotonic(), 0)) for armed in self._armed)

    def wait_jobs(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Waits until every job that the plan has begun has ended, one way or the other.

        Raises:
            AssertionError: one has not in time.
        """
        wait_for("the plan's jobs to end", lambda: all(caller.ended for caller in self._callers), timeout_s)

    def cancel(self) -> None:
        """Ends the plan early; what is stopped goes on."""
        self._cancelled.set()
        self._thread.join(FINISH_TIMEOUT_S)
        for caller in self._callers:
            caller.kill()

    @property
    def fired(self) -> list[Fired]:
        """What the plan and the proxies have done so far, in order."""
        return sorted([*self._fired, *self._cluster.network_fired()], key=lambda fired: fired.at_s)

    def counts(self) -> collections.Counter[str]:
        """Returns how often each kind of fault has fired."""
        return collections.Counter(fired.kind for fired in self.fired)

    # -- the thread

    def _play(self) -> None:
        try:
            while (self._waiting or self._undo) and not self._cancelled.is_set():
                self._step()
                time.sleep(POLL_S)
        except BaseException as error:  # noqa: BLE001 - the thread's edge: finish raises it
            self._failure = error
        finally:
            with contextlib.suppress(ProcessLookupError):
                for _, action in self._undo:
                    self._go_on(action)
            self._undo.clear()

    def _step(self) -> None:
        now = time.monotonic()
        for due, action in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove((due, action))
            self._go_on(action)
        for planned in list(self._waiting):
            if self._reached(planned.when) and self._act(planned.action):
                self._waiting.remove(planned)

    def _reached(self, when: When) -> bool:
        match when:
            case Elapsed(seconds):
                return time.monotonic() - self._start >= seconds
            case Acknowledged(worker, number):
                started = self._cluster.workers.started
                return worker < len(started) and started[worker].noted.acknowledged >= number
            case Stepped(step):
                return self._cluster.members.last_step >= step

    def _act(self, action: Action) -> bool:
        """Acts, and returns False if it is to be tried again."""
        match action:
            case KillShard() | StopShard():
                return self._act_on_shard(action)
            case KillInPhase(phase, index):
                if self._undo:
                    return False  # a step stands still meanwhile, and so does this thread
                step = kill_in_phase(self._cluster, phase, index)
                self._note(f"kill {'peer' if index else 'home'} ({phase.value})", f"shard {index}", f"step {step}")
            case KillMember() | StopMember():
                self._act_on_member(action)
            case KillWorker() | StartWorker() | StopWorker():
                self._act_on_worker(action)
            case KillAdmin() | StopAdmin():
                return self._act_on_admin(action)
            case MakeCheckpoint() | RestoreLatest() | MoveToShards():
                self._begin_job(action)
            case Network(shard, fault):
                self._armed.append(self._cluster.proxies[shard].arm(fault))
            case CutAll(shard):
                self._cluster.proxies[shard].cut_all()
            case _:
                return self._act_on_redis(action)
        return True

    def _act_on_shard(self, action: ShardAction) -> bool:
        index = action.index
        number = signal.SIGKILL if isinstance(action, KillShard) else signal.SIGSTOP
        if not self._serves(index) or not self._cluster.signal(index, number):
            return False
        if isinstance(action, StopShard):
            self._note("stop shard", f"shard {index}", f"{action.seconds:g} s")
            self._later(action.seconds, action)
        else:
            self._note("kill shard", f"shard {index}")
        return True

    def _act_on_worker(self, action: WorkerAction) -> None:
        if isinstance(action, StartWorker):
            self._cluster.workers.start(action.seed, MANY, pace_s=action.pace_s)
            return
        worker = self._worker(action.index)
        if not worker.alive:
            return
        if isinstance(action, StopWorker):
            worker.stop()
            self._note("stop worker", worker.name, f"{action.seconds:g} s")
            self._later(action.seconds, action)
        else:
            worker.kill()
            self._note("kill worker", worker.name)

    def _act_on_member(self, action: MemberAction) -> None:
        member = self._cluster.members.started[action.index]
        if not member.alive or any(undo == action for _, undo in self._undo):
            return
        if isinstance(action, StopMember):
            member.stop()
            self._note("stop member", member.name, f"{action.seconds:g} s")
            self._later(action.seconds, action)
        else:
            member.kill()
            self._note("kill member", member.name)
            self._later(action.again_after_s, action)

    def _begin_job(self, action: JobAction) -> None:
        """Asks for a job in a process of its own: what is broken meanwhile may keep it waiting, or fail it."""
        match action:
            case MakeCheckpoint():
                what, name = "create", ""
            case RestoreLatest():
                what, name = "restore", "latest"
            case MoveToShards(num_shards):
                what, name = "reshard", str(num_shards)
        caller = Caller(self._cluster, what, name)
        caller.start()
        self._callers.append(caller)
        self._note(what, "cluster", name)

    def _act_on_admin(self, action: AdminAction) -> bool:
        admin = self._cluster.admin
        assert admin is not None, "the plan breaks an admin API, and the cluster was started without one"
        if not admin.send(signal.SIGKILL if isinstance(action, KillAdmin) else signal.SIGSTOP):
            return False
        if isinstance(action, StopAdmin):
            self._note("stop admin", "admin", f"{action.seconds:g} s")
            self._later(action.seconds, action)
        else:
            self._note("kill admin", "admin")
        return True

    def _act_on_redis(self, action: RedisAction) -> bool:
        valkey = self._cluster.valkey
        if any(isinstance(undo, (KillRedis, StopRedis)) for _, undo in self._undo):
            return False  # it is away already
        match action:
            case KillRedis(seconds):
                valkey.stop()
                self._note("kill redis", "redis", f"{seconds:g} s")
                self._later(seconds, action)
            case StopRedis(seconds):
                valkey.process.send_signal(signal.SIGSTOP)
                self._note("stop redis", "redis", f"{seconds:g} s")
                self._later(seconds, action)
            case FlushRedis():
                with contextlib.closing(valkey.client()) as client:
                    client.flushall()
                self._note("flush redis", "redis")
        return True

    def _go_on(self, action: Action) -> None:
        match action:
            case StopShard(index):
                self._cluster.signal(index, signal.SIGCONT)
            case StopWorker(index):
                if self._worker(index).alive:
                    self._worker(index).go_on()
            case KillMember(index):
                self._cluster.members.start_again(self._cluster.members.started[index])
            case StopMember(index):
                if self._cluster.members.started[index].alive:
                    self._cluster.members.started[index].go_on()
            case StopAdmin() if self._cluster.admin is not None:
                self._cluster.admin.send(signal.SIGCONT)
            case KillRedis():
                self._cluster.valkey.start()
            case StopRedis():
                self._cluster.valkey.process.send_signal(signal.SIGCONT)

    def _serves(self, index: int) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK_S
        with contextlib.suppress(RedisUnreachable):
            return self._cluster.serves(index) is not None
        return False

    def _worker(self, index: int) -> Worker:
        return self._cluster.workers.started[index]

    def _later(self, seconds: float, action: Action) -> None:
        self._undo.append((time.monotonic() + seconds, action))

    def _note(self, kind: str, target: str, detail: str = "") -> None:
        self._fired.append(Fired(kind, target, detail))


@contextlib.contextmanager
def playing(cluster: FaultCluster, plan: Sequence[Planned]) -> Iterator[Injector]:
    """Plays a plan while the block runs; what is stopped goes on when the block fails."""
    injector = Injector(cluster, plan)
    injector.start()
    try:
        yield injector
    finally:
        injector.cancel()
