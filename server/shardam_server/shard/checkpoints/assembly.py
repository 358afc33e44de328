"""Puts a shard's part in checkpoints together, and home's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from shardam_proto.errors import BadOption
from shardam_proto.v1 import cut_pb2, job_pb2
from shardam_server.settings import ShardSettings
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.creation import Creation
from shardam_server.shard.checkpoints.cutting import Cutting
from shardam_server.shard.checkpoints.extras import Extras
from shardam_server.shard.checkpoints.home import HomeCheckpoints, Replacing, Schedule
from shardam_server.shard.context import ShardContext
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peers import Peers
from shardam_server.shard.services.cuts import Cuts


class Checkpoints:
    """A shard's part in checkpoints; made on its event loop.

    Args:
        shard: the shard.
        settings: its settings.
        peers: the other shards.
        directory: where they are.

    Attributes:
        cuts: does what home asks of this shard.
        home: home's; on the other shards it refuses; None: there is no folder for checkpoints.
        catalogue: where they lie; None: nowhere.
    """

    def __init__(
        self,
        shard: ShardContext,
        settings: ShardSettings,
        peers: Peers,
        directory: PeerDirectory,
        adopt: Callable[[cut_pb2.AdoptPlanRequest], Awaitable[cut_pb2.AdoptPlanResponse]],
    ) -> None:
        root = settings.checkpoint_root
        self.catalogue = None if root is None else Catalogue(root, settings.cluster)
        spare_bytes = JournalOptions.from_settings(settings).spare_bytes
        self.cuts = Cuts(shard, self.catalogue, spare_bytes, shard.holding.release, adopt)
        self.home = None if self.catalogue is None else self._home(self.catalogue, shard, settings, peers, directory)

    def _home(
        self,
        catalogue: Catalogue,
        shard: ShardContext,
        settings: ShardSettings,
        peers: Peers,
        directory: PeerDirectory,
    ) -> HomeCheckpoints:
        peer_cuts = PeerCuts(shard.identity, peers, directory, self.cuts)
        cutting, extras = Cutting(peer_cuts, settings.hold_s), Extras(catalogue.folder)
        creation = Creation(shard.identity, cutting, peer_cuts, catalogue, extras, settings.checkpoint_keep)
        schedule = Schedule(settings.checkpoint_every_s, settings.step_timeout_s)
        later = _Later()
        return HomeCheckpoints(shard, catalogue, extras, creation, cutting, Replacing(later, later), schedule)


class _Later:
    async def run(self, *args: object, **kwargs: object) -> job_pb2.RestoreReport:
        raise BadOption("is being built")
