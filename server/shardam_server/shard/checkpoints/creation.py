"""How home makes a checkpoint: cut, files of all shards, additions, manifest, and what is kept (PROTOCOL.md, section 8)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from importlib.metadata import version
from pathlib import Path

from shardam_proto.errors import CheckpointFailed, ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, common_pb2, cut_pb2, job_pb2
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.cutting import CutResult, Cutting, Tries
from shardam_server.shard.checkpoints.extras import Extras
from shardam_server.shard.checkpoints.file_messages import decode_shard
from shardam_server.shard.checkpoints.jobs import Job, ReportProgress
from shardam_server.shard.checkpoints.manifest import Manifest, StoredTable
from shardam_server.shard.identity import ShardIdentity, random_63_bits
from shardam_server.shard.option_messages import decode_options
from shardam_server.shard.peer_cuts import PeerCuts

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Shards are asked this often how far they are."""

AWAY_S = 30.0
"""A shard that writes may be unreachable for so long; one that died is noticed by its next process at once."""


@dataclasses.dataclass
class Terms:
    """What was asked for.

    Attributes:
        name: name of the checkpoint; empty: made of the time.
        additions: rank -> id of what its trainer adds.
        of_group: the group whose members asked together; empty: none.
        cut: the state is cut, so that nobody can join any more.
    """

    name: str = ""
    additions: dict[int, bytes] = dataclasses.field(default_factory=dict)
    of_group: str = ""
    cut: bool = False


class Creation:
    """Makes checkpoints, one at a time. Used on home's event loop.

    Args:
        identity: home's.
        cutting: cuts.
        cuts: asks shards.
        catalogue: where checkpoints lie.
        extras: what trainers add.
        keep: checkpoints without a name of their own that are kept; 0: all.
    """

    def __init__(
        self, identity: ShardIdentity, cutting: Cutting, cuts: PeerCuts, catalogue: Catalogue, extras: Extras, keep: int
    ) -> None:
        self._identity = identity
        self._cutting = cutting
        self._cuts = cuts
        self._catalogue = catalogue
        self._extras = extras
        self._keep = keep

    async def run(self, job: Job, terms: Terms, group_step: int = 0) -> None:
        """Makes one.

        Args:
            job: is told how far it is.
            terms: what was asked for; additions may come until the cut.
            group_step: step of the group whose members asked.

        Raises:
            ShardamError: it could not be made; nothing of it is left, and no shard is held.
        """
        await self._cuts.refresh()
        name = await asyncio.to_thread(self._open, terms.name)
        job.checkpoint = name
        cut: CutResult | None = None
        try:
            cut = await self._cut(job, terms)
            job.advance(0, cut.size_bytes, "writes files")
            job.under_way.set()
            shards = await self.written(job.advance, cut)
            await asyncio.to_thread(self.complete, name, cut, shards, terms.additions, group_step)
        except BaseException:
            await asyncio.shield(self._undo(cut))
            raise
        logger.info("checkpoint %s is complete: %d bytes", name, job.total_bytes)
        await asyncio.to_thread(self._prune, name)

    def _open(self, name: str) -> str:
        """Makes the checkpoint's folder."""
        self._catalogue.prepare()
        self._catalogue.remove_incomplete()
        self._extras.remove_old()
        return self._catalogue.new_folder(name).name

    async def _cut(self, job: Job, terms: Terms) -> CutResult:
        """Cuts, as often as it takes; each try with tasks of its own, since a shard may learn late that one was given up."""

        def close() -> None:
            terms.cut = True

        tries, folder = Tries(), self._catalogue.relative(self._catalogue.resolve(job.checkpoint))
        while True:
            job.attempts += 1
            job.phase = "brings all shards to the same changes"
            try:
                result = await self._cutting.cut(folder, random_63_bits(), without=tries.without, when_cut=close)
            except ShardamError as error:
                job.problem = error.message
                await tries.wait_after(error)
                await self._cuts.refresh()
            else:
                job.problem = ""
                return result

    async def written(self, report_progress: ReportProgress, cut: CutResult) -> list[checkpoint_pb2.CheckpointShard]:
        """Waits until all shards have written their files.

        Raises:
            CheckpointFailed: one has not, and will not.
        """
        written: dict[int, checkpoint_pb2.CheckpointShard] = {}
        done: dict[int, tuple[int, int]] = {}
        seen = dict.fromkeys(self._cuts.shards, time.monotonic())
        while True:
            for index in self._cuts.shards:
                if index in written:
                    continue
                try:
                    answer = await self._cuts.get_task(index, cut_pb2.GetTaskRequest(task_id=cut.task_id))
                except ShardamError as error:
                    if time.monotonic() - seen[index] > AWAY_S:
                        raise CheckpointFailed(f"shard {index} does not answer while it writes: {error.message}") from error
                    await self._cuts.refresh()
                    continue
                seen[index] = time.monotonic()
                done[index] = answer.done_bytes, answer.total_bytes
                if answer.state == job_pb2.JOB_STATE_DONE:
                    written[index] = answer.written
                elif answer.state != job_pb2.JOB_STATE_RUNNING:
                    raise _not_written(index, answer)
            report_progress(sum(one for one, _ in done.values()), sum(one for _, one in done.values()), "writes files")
            if len(written) == len(self._cuts.shards):
                return [written[index] for index in sorted(written)]
            await asyncio.sleep(POLL_S)

    def complete(
        self,
        name: str,
        cut: CutResult,
        shards: list[checkpoint_pb2.CheckpointShard],
        additions: dict[int, bytes],
        group_step: int = 0,
    ) -> Path:
        """Writes the manifest, with which the checkpoint is complete; blocking. Returns its folder.

        Raises:
            CheckpointFailed: files are not where home looks for them, or the manifest cannot be written.
            BadOption: an addition is gone.
        """
        identity, catalogue = self._identity, self._catalogue
        cluster, route_map = identity.require_cluster(), identity.require_route_map()
        folder = catalogue.resolve(name)
        for shard in shards:
            _check_seen(folder, shard)
        manifest = Manifest(
            name=name,
            checkpoint_id=cut.task_id,
            created_unix_s=catalogue.time_of_next(cut.created_unix_s),
            seconds=max(0.0, time.time() - cut.created_unix_s),
            version=version("shardam"),
            cluster_name=catalogue.folder.name,
            cluster_id=cluster.cluster_id,
            seed=cluster.seed,
            timeline=identity.timeline,
            epoch=route_map.epoch,
            num_shards=cluster.num_shards,
            tables=tuple(_stored_table(table) for table in cut.tables),
            shards=tuple(map(decode_shard, shards)),
            clients=cut.clients,
            extra={rank: self._extras.take(extra_id, rank, folder) for rank, extra_id in sorted(additions.items())},
            group_step=group_step,
        )
        catalogue.complete(manifest)
        return folder

    def _prune(self, name: str) -> None:
        if self._keep:
            for removed in self._catalogue.prune(self._keep, but=[name]):
                logger.info("checkpoint %s is deleted: the last %d are kept (--checkpoint-keep)", removed, self._keep)

    async def _undo(self, cut: CutResult | None) -> None:
        """Removes what there is of a checkpoint that failed; a cut that failed has given its tasks up itself."""
        if cut is not None:
            await self._cutting.drop(cut.task_id)
        await asyncio.to_thread(self._catalogue.remove_incomplete)


def _not_written(index: int, answer: cut_pb2.GetTaskResponse) -> CheckpointFailed:
    if answer.state == job_pb2.JOB_STATE_UNSPECIFIED:
        return CheckpointFailed(f"shard {index} was started anew while it wrote its files; make the checkpoint again")
    return CheckpointFailed(f"shard {index} could not write its files: {answer.problem}")


def _check_seen(folder: Path, shard: checkpoint_pb2.CheckpointShard) -> None:
    """Checks that home sees the files that a shard has written."""
    for file in shard.files:
        try:
            size = (folder / file.name).stat().st_size
        except OSError:
            size = -1
        if size != file.size_bytes:
            raise CheckpointFailed(
                f"shard {shard.index} wrote {file.name} to {shard.folder} on host {shard.host_name}, and home does not see it "
                f"in {folder}: all shards need the same --checkpoint-dir, on a volume that they share",
                metadata={"shard": str(shard.index), "file": file.name},
            )


def _stored_table(info: common_pb2.TableInfo) -> StoredTable:
    options = decode_options(info.last_options) if info.HasField("last_options") else None
    return StoredTable(TableSpec.from_proto(info.spec), info.table_id, info.table_seed, info.table_step, info.num_rows, options)
