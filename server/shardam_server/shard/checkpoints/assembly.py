"""Puts together a shard's part in checkpoints, and home's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shardam_proto.errors import CheckpointDamaged, CheckpointFailed
from shardam_proto.registry import Plan
from shardam_proto.v1 import cut_pb2
from shardam_server.command_errors import UsageError
from shardam_server.settings import ShardSettings
from shardam_server.shard.checkpoints.adoption import Adoption, ServingLife
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.creation import Creation
from shardam_server.shard.checkpoints.cutting import Cutting
from shardam_server.shard.checkpoints.extras import Extras
from shardam_server.shard.checkpoints.final_holds import FinalHolds
from shardam_server.shard.checkpoints.home import HomeCheckpoints, Replacing, Schedule
from shardam_server.shard.checkpoints.leaving import Leaving
from shardam_server.shard.checkpoints.loading import load
from shardam_server.shard.checkpoints.plans import needed_folder
from shardam_server.shard.checkpoints.resharding import Resharding
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

logger = logging.getLogger(__name__)


class Checkpoints:
    """A shard's part in checkpoints; made on its event loop.

    Args:
        shard: the shard.
        settings: its settings.
        registration: its entries in Redis.
        membership: its place in the cluster.
        peers: the other shards.
        directory: where they are.
        life: what begins and ends with serving.
        make_state: makes an empty state.

    Attributes:
        cuts: does what home asks of this shard.
        home: home's, though every shard has it; None: there is no folder for checkpoints.
        adoption: takes plans over.
        leaving: ends the process once its state has moved.
    """

    def __init__(
        self,
        shard: ShardContext,
        settings: ShardSettings,
        registration: Registration,
        membership: Membership,
        peers: Peers,
        directory: PeerDirectory,
        life: ServingLife,
        make_state: Callable[[], ShardState],
    ) -> None:
        self._shard = shard
        self._settings = settings
        self._registration = registration
        self._clearing: asyncio.Task[None] | None = None
        root = settings.checkpoint_root
        self._catalogue = None if root is None else Catalogue(root, settings.cluster)
        self.leaving = Leaving(shard, settings)
        self.adoption = Adoption(shard, registration, membership, life, make_state, self._load, self.leaving.begin)
        self._final_holds = FinalHolds(shard.identity, shard.holding, registration.end_move, self.adoption.notice)
        spare_bytes = JournalOptions.from_settings(settings).spare_bytes
        self.cuts = Cuts(shard, self._catalogue, spare_bytes, self._final_holds.final_hold_expired, self._adopt)
        peer_cuts = PeerCuts(shard.identity, peers, directory, self.cuts)
        self.home = None if self._catalogue is None else self._home(self._catalogue, peer_cuts)

    def _home(self, catalogue: Catalogue, peer_cuts: PeerCuts) -> HomeCheckpoints:
        shard, settings = self._shard, self._settings
        cutting, extras = Cutting(peer_cuts, settings.hold_s), Extras(catalogue.folder)
        creation = Creation(shard.identity, cutting, peer_cuts, catalogue, extras, settings.checkpoint_keep)
        restoring = Restoring(shard, self._registration, peer_cuts, cutting, catalogue, self.adoption)
        resharding = Resharding(shard, self._registration, peer_cuts, cutting, creation, catalogue)
        schedule = Schedule(settings.checkpoint_every_s, settings.step_timeout_s)
        return HomeCheckpoints(
            shard,
            catalogue,
            extras,
            creation,
            cutting,
            Replacing(restoring, resharding, lambda: needed_folder(self._registration)),
            schedule,
        )

    async def check_folder(self) -> None:
        """Looks whether checkpoints can be written, before anyone relies on them.

        Raises:
            UsageError: they cannot, and this shard has no state yet that training could go on with.
        """
        if self.home is None:
            return
        try:
            await self.home.check_folder()
        except CheckpointFailed as error:
            if self._settings.checkpoint_dir is not None and self._shard.kept.current is None:
                raise UsageError(error.message) from error
            logger.error("%s; no checkpoint can be made until then", error.message)

    def start(self) -> None:
        """Begins what home does by itself, and removes what shards have left whose rows moved here."""
        if self.home is not None:
            self.home.start()
        self._clearing = asyncio.create_task(self.leaving.clear_up())

    async def stop(self) -> None:
        """Ends all work for checkpoints."""
        if self.home is not None:
            await self.home.stop()
        await self.adoption.stop()
        await self._final_holds.stop()
        if self._clearing is not None:
            await asyncio.wait({self._clearing})
        await self._shard.tasks.stop()

    async def _adopt(self, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        return await plans.adopt(self._shard, self.adoption, request)

    def _load(self, state: ShardState, plan: Plan, progress: Progress) -> None:
        """Puts this shard's share of a plan's checkpoint into a state; blocking."""
        index = self._shard.identity.index
        if self._catalogue is None:
            raise no_folder(index)
        manifest, folder = self._catalogue.read(plan.folder)
        if manifest.checkpoint_id != plan.checkpoint_id:
            raise CheckpointDamaged(
                f"{folder} holds another checkpoint than the one that the cluster goes on from (id "
                f"{manifest.checkpoint_id:016x}, not {plan.checkpoint_id:016x}); put that one back",
                metadata={"folder": str(folder)},
            )
        load(state, manifest, folder, plan, index, state.device.make_records, progress)
