"""A cluster that is made to be broken: every shard behind a proxy, with a data folder, started again when it dies."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import ClusterView, ShardEntry
from shardam_proto.v1 import shard_pb2
from shardam_testing.faults.checkpoint_calls import CheckpointCalls
from shardam_testing.faults.kept_admin import KeptAdmin
from shardam_testing.faults.members import Members
from shardam_testing.faults.network_faults import Fired
from shardam_testing.faults.ports import lasting_ports
from shardam_testing.faults.proxy import FaultProxy
from shardam_testing.faults.workers import Launch, WorkerProcess, Workers
from shardam_testing.processes import ShardProcess, Shards, Valkey, running_valkey
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.waiting import wait_for

SHRUNK = {"lease-s": "0.5", "client-lease-s": "4", "drain-s": "5", "redis-timeout-s": "1"}
"""Waits of a cluster under faults: leases so short that ten of them fit into a test."""

RESTART_DELAY_S = 0.1
"""A dead shard is started again after this long."""

READY_TIMEOUT_S = 90.0
"""A shard is back in 1 to 3 s on an idle machine."""

RESHARDED = 76
"""Exit status of a shard whose state has moved to another number of shards."""

WORKER_TIMEOUT_S = 200.0
"""A worker of the tests trains for seconds, and waits as long for each shard that starts again."""


@dataclasses.dataclass
class FaultCluster:
    """A cluster and the handles by which it is broken. Made by running_fault_cluster.

    Attributes:
        valkey: its Redis.
        folder: for state and logs.
        shards: its processes.
        proxies: one before each shard.
        workers: its workers without a group.
        members: its workers in groups.
        admin: its admin API, if it has one.
        num_restarts: shards started again so far.
        num_moves: how often the state has moved to another number of shards.
    """

    valkey: Valkey
    folder: Path
    shards: Shards
    proxies: list[FaultProxy]
    ports: list[int]
    flags: dict[str, str]
    workers: Workers
    members: Members
    admin: KeptAdmin | None
    num_restarts: int = 0
    num_moves: int = 0

    def __post_init__(self) -> None:
        self._current: list[ShardProcess] = []
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._unexpected: list[str] = []
        self._held: set[int] = set()
        self._keeper = threading.Thread(target=self._keep, name="keeper of shards", daemon=True)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return self.shards.count

    @property
    def state_folder(self) -> Path:
        """The data folder of all shards."""
        return self.folder / "state"

    @property
    def checkpoints(self) -> CheckpointCalls:
        """Calls of its home that have to do with checkpoints."""
        return CheckpointCalls(self.view)

    def checkpoint_folder(self, name: str) -> Path:
        """Returns where a checkpoint lies."""
        root = Path(self.flags.get("checkpoint_dir", self.state_folder / "checkpoints"))
        return root / self.shards.cluster / name

    # -- processes

    def start(self) -> None:
        """Starts all shards, waits until they serve, and from then on starts the dead ones again."""
        self._current = [self._start(index) for index in range(self.num_shards)]
        self.wait_ready()
        self._keeper.start()

    def close(self) -> None:
        """Ends all processes."""
        self._stopping.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self.workers.close()
        self.members.close()
        self.shards.stop()

    def process(self, index: int) -> ShardProcess:
        """Returns a shard's present process."""
        return self._current[index]

    def signal(self, index: int, number: signal.Signals) -> bool:
        """Sends a signal to a shard; returns False if it was not alive."""
        with self._lock:
            process = self._current[index].process
            if process.poll() is not None:
                return False
            process.send_signal(number)
            if number == signal.SIGKILL:
                process.wait()
            return True

    @contextlib.contextmanager
    def held_down(self, index: int) -> Iterator[None]:
        """Kills a shard and does not start it again within the block."""
        self._held.add(index)
        try:
            assert self.signal(index, signal.SIGKILL), f"shard {index} was not alive"
            yield
        finally:
            self._held.discard(index)

    def check(self) -> None:
        """Checks that no shard has ended but by SIGKILL.

        Raises:
            AssertionError: one has; the message has its log.
        """
        assert not self._unexpected, "\n".join(self._unexpected)

    def _start(self, index: int) -> ShardProcess:
        place = {"port": str(self.ports[index]), "advertise": self.proxies[index].address, "data_dir": str(self.state_folder)}
        return self.shards.start(index, **{"journal": "write", **self.flags, **place})

    def _keep(self) -> None:
        while not self._stopping.wait(RESTART_DELAY_S):
            if self.admin is not None:
                self.admin.keep()
            with self._lock:
                if any(shard.process.poll() == RESHARDED for shard in self._current):
                    self._move()
                    continue
            for index in set(range(self.num_shards)) - self._held:
                with self._lock:
                    status = self._current[index].process.poll()
                    if status in (None, RESHARDED):
                        continue
                    if status != -signal.SIGKILL:
                        self._unexpected.append(
                            f"shard {index} ended with {status}:\n{self._current[index].log_text()[-4000:]}"
                        )
                    self._current[index] = self._start(index)
                    self.num_restarts += 1

    def _move(self) -> None:
        """Starts the shards that the state has moved to, once all that had it have ended."""
        if any(shard.process.poll() is None for shard in self._current):
            return
        with contextlib.suppress(RedisUnreachable):
            entry = self.view().entry
            assert entry is not None, "shards have ended because their state has moved, and Redis knows no cluster"
            self.shards.count = entry.num_shards
            self._current = [self._start(index) for index in range(entry.num_shards)]
            self.num_moves += 1

    # -- questions

    def view(self) -> ClusterView:
        """Reads what Redis says."""
        return self.shards.view()

    def serves(self, index: int) -> ShardEntry | None:
        """Returns a shard's entry if its present process is registered as ready."""
        entry = self.view().shards.get(index)
        return entry if entry is not None and entry.ready and entry.pid == self._current[index].process.pid else None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until every shard's present process serves.

        Raises:
            AssertionError: they do not in time, or one has ended by itself.
        """

        def ready() -> bool:
            self.check()
            return all(self.serves(index) for index in range(self.num_shards))

        try:
            wait_for("all shards to serve", ready, timeout_s)
        except AssertionError as error:
            logs = [shard.log_text()[-2000:] for shard in self._current]
            raise AssertionError(f"{error}; last logs:\n" + "\n".join(logs)) from error

    def wait_end(self, worker: WorkerProcess, timeout_s: float = WORKER_TIMEOUT_S) -> int:
        """Waits for a worker's end and returns its exit status.

        Raises:
            AssertionError: it did not end in time, or a shard has ended by itself.
        """

        def ended() -> bool:
            self.check()
            return not worker.alive

        wait_for(f"{worker.name} to end", ended, timeout_s)
        return worker.wait()

    @contextlib.contextmanager
    def clients(self) -> Iterator[list[RawClient]]:
        """Opens a raw client, without Open, on every shard."""
        view = self.view()
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(raw_client(view, index)) for index in range(self.num_shards)]

    def statuses(self) -> list[shard_pb2.GetStatusResponse]:
        """Asks every shard for its status."""
        with self.clients() as clients:
            return [client.status() for client in clients]

    def heal(self) -> None:
        """Ends all network faults."""
        for proxy in self.proxies:
            proxy.heal()

    def network_fired(self) -> list[Fired]:
        """Returns what the proxies have done."""
        return [fired for proxy in self.proxies for fired in proxy.fired]


@contextlib.contextmanager
def running_fault_cluster(
    folder: Path, num_shards: int, *, most_shards: int = 0, with_admin: bool = False, reads_messages: bool = False, **flags: str
) -> Iterator[FaultCluster]:
    """Starts Valkey, proxies and shards; everything ends with the context, also when a test fails.

    Args:
        folder: for state, logs and progress files.
        num_shards: number of shards.
        most_shards: to which it may be moved.
        with_admin: start an admin API, too.
        reads_messages: the proxies tell the messages of group steps, which costs them time.
        flags: of the shards, beside SHRUNK.
    """
    given = {**{name.replace("-", "_"): value for name, value in SHRUNK.items()}, **flags}
    redis_port, admin_port, *ports = lasting_ports(2 + max(num_shards, most_shards))
    with running_valkey(redis_port) as valkey, contextlib.ExitStack() as stack:
        proxies = [
            stack.enter_context(FaultProxy(f"shard {index}", port, reads_messages=reads_messages))
            for index, port in enumerate(ports)
        ]
        shards = Shards(valkey, folder, num_shards)
        admin = KeptAdmin(valkey.url, folder, admin_port) if with_admin else None
        if admin is not None:
            stack.callback(admin.close)
        workers, members = Workers(valkey.url, folder), Members(Launch(valkey.url, folder))
        cluster = FaultCluster(valkey, folder, shards, proxies, ports, given, workers, members, admin)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
