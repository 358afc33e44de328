"""The shards that one `up` runs: as many as it was told to, then as many as the cluster has moved to (`shardam reshard`)."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

from shardam_proto.registry import ShardEntry
from shardam_server.bind import check_port_free
from shardam_server.child_commands import ChildCommands
from shardam_server.children import Child, Console
from shardam_server.command_errors import PortInUse, Resharded
from shardam_server.data_folder import aftermath_of_a_kill
from shardam_server.readiness import ClusterProbe
from shardam_server.settings import UpSettings
from shardam_server.supervisor import Kept, RestartPolicy

_log = logging.getLogger(__name__)

_LAST_PORT = 65_535


@dataclasses.dataclass(frozen=True)
class ShardTerms:
    """How the shards of one `up` are run.

    Attributes:
        settings: settings of `up`.
        commands: how shards are started.
        console: where their lines go.
        probe: looks at the cluster.
        policy: when a dead shard is started again.
        after: what must be ready whenever a shard is started.
    """

    settings: UpSettings
    commands: ChildCommands
    console: Console
    probe: ClusterProbe
    policy: RestartPolicy
    after: Sequence[Kept]


class UpShards:
    """Makes the children that are shards, and those that take their place.

    Args:
        terms: how they are run.
        report_lost: told of a shard that is LOST.
        admin_port: returns the admin API's port; 0: none yet.
    """

    def __init__(self, terms: ShardTerms, report_lost: Callable[[ShardEntry], None], admin_port: Callable[[], int]) -> None:
        self._terms = terms
        self._settings = settings = terms.settings
        self._probe = terms.probe
        self._policy = dataclasses.replace(terms.policy, leaving_status=Resharded.exit_code)
        self._report_lost = report_lost
        self._admin_port = admin_port
        self._num_shards = settings.shards
        # A shard on a free port keeps the port that it first took, so that workers find it again.
        self._ports = {index: settings.port + index if settings.port else 0 for index in range(settings.shards)}
        self._have_served: set[int] = set()
        self._serving_now: set[int] = set()
        self._replaced = False

    def make(self) -> list[Kept]:
        """Makes one child for each shard that there is now."""
        return [self._make_shard(index) for index in range(self._num_shards)]

    async def replace(self) -> list[Kept]:
        """Makes the children for the number of shards that the cluster has moved to; all former ones have ended.

        Raises:
            CommandError: Redis holds what is not of this version.
        """
        former = self._num_shards
        # A Redis that has lost the move has lost it before anyone took it over: the former shards go on.
        self._num_shards = await self._probe.num_shards() or former
        self._ports = {index: self._port_of(index, is_new=index >= former) for index in range(self._num_shards)}
        self._serving_now.clear()
        self._replaced = True
        last = self._num_shards - 1
        _log.info("the cluster has moved from %d to %d shards: starts shards 0 to %d", former, self._num_shards, last)
        return self.make()

    def _port_of(self, index: int, *, is_new: bool) -> int:
        """Returns the port of a shard in the new number; 0: any."""
        if not is_new:
            return self._ports[index]
        if not self._settings.port:
            return 0
        port = self._settings.port + index
        if port > _LAST_PORT:
            problem = f"the last port is {_LAST_PORT}"
        elif port == self._admin_port():
            problem = "it is the admin API's"
        else:
            try:
                check_port_free(self._settings.host, port, "--port")
                return port
            except PortInUse:
                problem = "it is taken"
        _log.warning("shard %d cannot listen on port %d (%s): it takes a free port", index, port, problem)
        return 0

    def _make_shard(self, index: int) -> Kept:
        settings, count = self._settings, self._num_shards
        spec = self._terms.commands.shard(
            index, lambda: self._ports[index], lambda: self._replaced or index in self._have_served, count
        )
        return Kept(
            Child(spec, self._terms.console),
            functools.partial(self._shard_ready, index),
            self._policy,
            after=self._terms.after,
            aftermath=aftermath_of_a_kill(index, settings.data_dir, settings.journal_mode),
            has_left=functools.partial(self._has_moved, index, count),
        )

    async def _shard_ready(self, index: int, pid: int) -> None:
        entry = await self._probe.shard_ready(index, pid, self._report_lost)
        self._have_served.add(index)
        self._serving_now.add(index)
        self._ports[index] = self._ports[index] or int(entry.address.rpartition(":")[2])

    async def _has_moved(self, index: int, count: int) -> bool:
        """Says whether a shard is refused only because the cluster has moved to another number of shards since it served."""
        return index in self._serving_now and await self._probe.num_shards() not in (None, count)
