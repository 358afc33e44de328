"""Puts a shard's part in checkpoints together, and home's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shardam_proto.errors import BadOption, CheckpointDamaged
from shardam_proto.registry import Plan
from shardam_proto.v1 import cut_pb2
from shardam_server.settings import ShardSettings
from shardam_server.shard.checkpoints import loading
from shardam_server.shard.checkpoints.adoption import Adoption, ServingLife
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.creation import Creation
from shardam_server.shard.checkpoints.cutting import Cutting
from shardam_server.shard.checkpoints.extras import Extras
from shardam_server.shard.checkpoints.home import HomeCheckpoints, Replacing, Schedule
from shardam_server.shard.checkpoints.jobs import ReportProgress
from shardam_server.shard.checkpoints.restoring import Restoring
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.context import ShardContext
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.membership import Membership
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.peer_directory import PeerDirectory
from shardam_server.shard.peers import Peers
from shardam_server.shard.registration import Registration
from shardam_server.shard.services import plans
from shardam_server.shard.services.cuts import Cuts, no_folder
from shardam_server.shard.state import ShardState


@dataclasses.dataclass(frozen=True)
class ShardParts:
    """What a shard process consists of, as far as checkpoints need it.

    Attributes:
        shard: the shard.
        settings: its settings.
        peers: the other shards.
        directory: where they are.
        registration: its entries in Redis.
        membership: its place in the cluster.
    """

    shard: ShardContext
    settings: ShardSettings
    peers: Peers
    directory: PeerDirectory
    registration: Registration
    membership: Membership


class Checkpoints:
    """A shard's part in checkpoints; made on its event loop.

    Args:
        parts: what the process consists of.
        life: what begins and ends with serving.
        make_state: makes an empty state.

    Attributes:
        adoption: takes plans over.
        cuts: does what home asks of this shard.
        home: home's; on the other shards it refuses; None: there is no folder for checkpoints.
        catalogue: where they lie; None: nowhere.
    """

    def __init__(self, parts: ShardParts, life: ServingLife, make_state: Callable[[], ShardState]) -> None:
        self._parts = parts
        shard, settings = parts.shard, parts.settings
        root = settings.checkpoint_root
        self.adoption = Adoption(shard, parts.registration, parts.membership, life, make_state, self._load)
        self.catalogue = None if root is None else Catalogue(root, settings.cluster)
        spare_bytes = JournalOptions.from_settings(settings).spare_bytes
        self.cuts = Cuts(shard, self.catalogue, spare_bytes, shard.holding.release, self._adopt)
        peer_cuts = PeerCuts(shard.identity, parts.peers, parts.directory, self.cuts)
        self.home = None if self.catalogue is None else self._home(self.catalogue, peer_cuts)

    def _home(self, catalogue: Catalogue, peer_cuts: PeerCuts) -> HomeCheckpoints:
        shard, settings = self._parts.shard, self._parts.settings
        cutting, extras = Cutting(peer_cuts, settings.hold_s), Extras(catalogue.folder)
        creation = Creation(shard.identity, cutting, peer_cuts, catalogue, extras, settings.checkpoint_keep)
        restoring = Restoring(shard, self._parts.registration, peer_cuts, cutting, catalogue, self.adoption)
        schedule = Schedule(settings.checkpoint_every_s, settings.step_timeout_s)
        return HomeCheckpoints(shard, catalogue, extras, creation, cutting, Replacing(restoring, _NoReshards()), schedule)

    async def _adopt(self, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        return await plans.adopt(self._parts.shard, self.adoption, request)

    def _load(self, state: ShardState, plan: Plan, progress: Progress) -> None:
        """Puts this shard's share of a plan's checkpoint into an empty state; blocking.

        Raises:
            BadOption: there is no folder for checkpoints.
            CheckpointDamaged: another checkpoint is in the plan's folder, or a file of it is not as it was written.
            ShardamError: it cannot be loaded.
        """
        shard = self._parts.shard
        if self.catalogue is None:
            raise no_folder(shard.identity.index)
        manifest, folder = self.catalogue.read(plan.folder)
        if manifest.checkpoint_id != plan.checkpoint_id:
            raise CheckpointDamaged(
                f"{folder} holds another checkpoint than the one that the cluster was restored from; put that one back, or "
                "restore another one",
                metadata={"folder": str(folder)},
            )
        loading.load(state, manifest, folder, plan, shard.identity.index, shard.device.make_records, progress)


class _NoReshards:
    async def run(self, num_shards: int, report_progress: ReportProgress) -> None:
        raise BadOption(f"the state cannot be moved to {num_shards} shards")
