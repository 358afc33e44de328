"""A shard's side of cuts and checkpoints: what home asks of every shard (PROTOCOL.md, section 8)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from shardam_proto.errors import BadOption, StaleState
from shardam_proto.v1 import cut_pb2, job_pb2
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.checking import CheckFiles
from shardam_server.shard.checkpoints.writing import WriteCut, WriteTerms
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.context import ShardContext
from shardam_server.shard.snapshots import Snapshot

MAX_HOLD_S = 60.0
"""No hold is longer, so that a shard never stands still for long because home has died."""

LOOK_S = 0.005
"""A shard that is to reach numbers looks this often: a hold is for seconds, and a push takes about a millisecond."""

MAX_ANSWERS = 16
"""Answers to Cut that are remembered for repeats; home makes one cut at a time."""


class Cuts:
    """What home asks of this shard for cuts. Used on the event loop.

    Args:
        shard: the shard.
        catalogue: where checkpoints lie; None: nowhere.
        spare_bytes: bytes that stay free on a disk that is written to.
        when_final_expired: called with the id of a final hold that has run out.
        adopt: takes note of a plan.
    """

    def __init__(
        self,
        shard: ShardContext,
        catalogue: Catalogue | None,
        spare_bytes: int,
        when_final_expired: Callable[[int], None],
        adopt: Callable[[cut_pb2.AdoptPlanRequest], Awaitable[cut_pb2.AdoptPlanResponse]],
    ) -> None:
        self._shard = shard
        self._catalogue = catalogue
        self._spare_bytes = spare_bytes
        self._when_final_expired = when_final_expired
        self._adopt = adopt
        self._answers: dict[int, cut_pb2.CutResponse] = {}

    async def hold(self, request: cut_pb2.HoldRequest) -> cut_pb2.HoldResponse:
        """Holds changes back and tells where clients stand behind what came before.

        Raises:
            BadOption: a hold that cannot be.
            CheckpointFailed: the folder for checkpoints cannot be written.
            StaleState: a hold that was to be lengthened has ended (HOLD_EXPIRED).
            ShardamError: the shard does not serve.
        """
        shard, hold_id = self._shard, request.hold_id
        shard.check_serving(request.header)
        if not hold_id or not 0 < request.hold_s <= MAX_HOLD_S:
            raise BadOption(f"a hold needs an id and up to {MAX_HOLD_S:g} s, got id {hold_id} and {request.hold_s:g} s")
        root_id = "" if self._catalogue is None else await asyncio.to_thread(self._catalogue.prepare)
        expired = self._when_final_expired if request.final else None
        if request.renews:
            shard.holding.check(hold_id)
        shard.holding.hold(hold_id, MAX_HOLD_S, expired)  # its clock begins when what came before is applied
        try:
            clients = await shard.sequencer.change(lambda: held_clients(list(shard.state.clients)))
        finally:  # whoever asked may be dead by now, and then nobody else shortens it
            if shard.holding.hold_id == hold_id:
                shard.holding.hold(hold_id, request.hold_s, expired)
        shard.holding.check(hold_id)
        return cut_pb2.HoldResponse(header=shard.header(request.header), clients=clients, root_id=root_id)

    async def advance(self, request: cut_pb2.AdvanceRequest) -> cut_pb2.AdvanceResponse:
        """Applies changes up to numbers.

        Raises:
            StaleState: the hold ended before (HOLD_EXPIRED); the metadata names the clients that lack numbers.
        """
        shard = self._shard
        shard.check_serving(request.header)
        shard.holding.check(request.hold_id)
        targets = {client.client_id: client.last_number for client in request.targets}
        shard.holding.advance(targets)
        while behind := self._behind(targets):
            if shard.holding.hold_id != request.hold_id:
                raise _not_reached(behind, targets)
            await asyncio.sleep(LOOK_S)
        return cut_pb2.AdvanceResponse(header=shard.header(request.header))

    def _behind(self, targets: dict[bytes, int]) -> list[bytes]:
        clients = self._shard.state.clients
        entries = {client_id: clients.find(client_id) for client_id in targets}
        return [
            client_id
            for client_id, number in targets.items()
            if (entry := entries[client_id]) is None or entry.last_number < number
        ]

    async def cut(self, request: cut_pb2.CutRequest) -> cut_pb2.CutResponse:
        """Cuts, and begins to write what was cut.

        Raises:
            StaleState: the hold has ended (HOLD_EXPIRED).
            BadOption: there is no folder for checkpoints, or the request's is none in it.
        """
        shard, task_id = self._shard, request.task_id
        known = self._answers.get(task_id)
        if known is not None and shard.tasks.knows(task_id):
            return known
        shard.check_serving(request.header)
        catalogue = self._require_catalogue()
        shard.holding.check(request.hold_id)
        taken = shard.submit_now(lambda: Snapshot(shard.state))  # what is held back comes after it, whenever it starts
        if shard.holding.is_final:
            shard.holding.seal()
        snapshot = await shard.settle(taken)
        terms = WriteTerms(
            cluster_id=shard.identity.require_cluster().cluster_id,
            checkpoint_id=task_id,
            index=shard.identity.index,
            num_shards=shard.identity.require_cluster().num_shards,
            root=catalogue.root,
            folder=request.folder,
            staging=self._staging(),
            host_name=socket.gethostname(),
            spare_bytes=self._spare_bytes,
        )
        shard.tasks.start(task_id, WriteCut(snapshot, terms), snapshot.size_bytes)
        answer = cut_pb2.CutResponse(
            header=shard.header(request.header),
            tables=snapshot.tables,
            clients=held_clients(snapshot.clients),
            size_bytes=snapshot.size_bytes,
        )
        answer.header.change_number = snapshot.change_number
        self._answers[task_id] = answer
        for former in list(self._answers)[:-MAX_ANSWERS]:
            del self._answers[former]
        return answer

    def _staging(self) -> Path | None:
        return self._shard.kept.folder if self._shard.kept.live else None

    async def release(self, request: cut_pb2.ReleaseRequest) -> cut_pb2.ReleaseResponse:
        """Ends a hold."""
        self._shard.identity.check(request.header)
        self._shard.holding.release(request.hold_id)
        return cut_pb2.ReleaseResponse(header=self._shard.header(request.header))

    async def check_files(self, request: cut_pb2.CheckFilesRequest) -> cut_pb2.CheckFilesResponse:
        """Begins to check the files that this shard would load.

        Raises:
            BadOption: there is no folder for checkpoints.
        """
        shard = self._shard
        shard.identity.check(request.header)
        catalogue = self._require_catalogue()
        work = CheckFiles(catalogue.root, request.folder, shard.identity.index, request.num_shards)
        shard.tasks.start(request.task_id, work)
        return cut_pb2.CheckFilesResponse(header=shard.header(request.header))

    async def adopt_plan(self, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        """Learns of a plan.

        Raises:
            ShardamError: it cannot be taken over.
        """
        return await self._adopt(request)

    async def get_task(self, request: cut_pb2.GetTaskRequest) -> cut_pb2.GetTaskResponse:
        """Describes a task."""
        shard, task_id = self._shard, request.task_id
        shard.identity.check(request.header)
        answer = cut_pb2.GetTaskResponse(header=shard.header(request.header), state=shard.tasks.describe(task_id))
        if answer.state != job_pb2.JOB_STATE_UNSPECIFIED:
            progress = shard.tasks.progress(task_id)
            answer.done_bytes, answer.total_bytes = progress.done_bytes, progress.total_bytes
            written, error = shard.tasks.result(task_id)
            if written is not None:
                answer.written.CopyFrom(written)
            if error is not None:
                answer.problem, answer.reason = error.message, error.reason
        return answer

    async def drop_task(self, request: cut_pb2.DropTaskRequest) -> cut_pb2.DropTaskResponse:
        """Gives a task up, or all."""
        self._shard.identity.check(request.header)
        await self._shard.tasks.drop(request.task_id)
        return cut_pb2.DropTaskResponse(header=self._shard.header(request.header))

    def _require_catalogue(self) -> Catalogue:
        if self._catalogue is None:
            raise no_folder(self._shard.identity.index)
        return self._catalogue


def no_folder(index: int) -> BadOption:
    """Returns the error of a shard that has no folder for checkpoints."""
    return BadOption(
        f"shard {index} has no folder for checkpoints: start the shards with --checkpoint-dir (or --data-dir)",
        metadata={"shard": str(index)},
    )


def held_clients(clients: Iterable[tuple[bytes, ClientEntry]]) -> list[cut_pb2.HeldClient]:
    """Returns where clients stand, but for those that are over."""
    return [
        cut_pb2.HeldClient(client_id=client_id, last_number=entry.last_number, heartbeats=entry.heartbeats)
        for client_id, entry in clients
        if not entry.is_over
    ]


def _not_reached(behind: list[bytes], targets: dict[bytes, int]) -> StaleState:
    named = ", ".join(f"{client_id.hex()} (to number {targets[client_id]})" for client_id in behind[:4])
    return StaleState(
        f"the hold ended before {len(behind)} clients had their numbers here: {named}",
        reason="HOLD_EXPIRED",
        metadata={"clients": ",".join(client_id.hex() for client_id in behind)},
    )
