"""Home's cut: one consistent state of all shards, in all modes (PROTOCOL.md, section 8).

Hold everywhere; bring all shards to the highest number that one of them has of each client; cut; release. What a hold is on a
shard is in services/cuts.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

from shardam_proto.errors import BadOption, ShardamError, StaleState
from shardam_proto.v1 import common_pb2, cut_pb2
from shardam_server.shard.identity import random_63_bits
from shardam_server.shard.peer_cuts import PeerCuts

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
"""Waits between two tries to cut double from the first to the longest."""

LEVEL_BY_NOBODY = "level_by_nobody"
"""Key of an error's metadata: clients without heartbeats that lack numbers somewhere. Nobody brings them level, so the next try
goes on without them; a REST change that broke off between two shards is repeated by its caller, or never."""

MAX_TRY_S = 120.0
"""A cut is given up after this time: a worker that died in mid-push is settled by then (client_lease_s), an absent shard is an
operator's."""


@dataclasses.dataclass(frozen=True)
class CutResult:
    """A state that is cut.

    Attributes:
        hold_id: the hold; released, unless it was final.
        task_id: the task that writes the files, on each shard; the checkpoint's id.
        created_unix_s: when.
        change_numbers: each shard's change number.
        tables: tables by name, with rows over all shards.
        clients: client id -> number.
        size_bytes: about how many bytes will be written.
    """

    hold_id: int
    task_id: int
    created_unix_s: float
    change_numbers: tuple[int, ...]
    tables: tuple[common_pb2.TableInfo, ...]
    clients: Mapping[bytes, int]
    size_bytes: int


class Cutting:
    """Cuts the state of all shards. Used on home's event loop.

    Args:
        cuts: asks shards, home itself among them.
        hold_s: how long changes may be held back.
    """

    def __init__(self, cuts: PeerCuts, hold_s: float) -> None:
        self._cuts = cuts
        self._hold_s = hold_s

    async def cut(
        self,
        folder: str,
        task_id: int,
        *,
        final: bool = False,
        without: Iterable[bytes] = (),
        when_cut: Callable[[], None] = lambda: None,
    ) -> CutResult:
        """Tries once to cut.

        Args:
            folder: folder of the checkpoint, relative to the root folder.
            task_id: id of the tasks that write the files.
            final: do not release; the caller renews the hold, and releases it.
            without: clients whose numbers may be unequal: nobody brings them level.
            when_cut: called once the state is cut, before any shard goes on; what is applied from then on is not in it.

        Raises:
            StaleState: a hold ran out before (HOLD_EXPIRED); the metadata may name the clients that lacked numbers.
            ShardamError: a shard refused or did not answer. No shard is held or writes then.
        """
        hold_id, cut = random_63_bits(), False
        try:
            held = await self._all(
                lambda index: self._cuts.hold(index, cut_pb2.HoldRequest(hold_id=hold_id, hold_s=self._hold_s, final=final))
            )
            _check_one_root([answer.root_id for answer in held])
            targets = _targets([answer.clients for answer in held], frozenset(without))
            await self._advance(hold_id, targets)
            created = time.time()
            answers = await self._all(
                lambda index: self._cuts.cut(index, cut_pb2.CutRequest(hold_id=hold_id, task_id=task_id, folder=folder))
            )
            result = _merged(hold_id, task_id, created, answers, frozenset(without))
            cut = True
            when_cut()
            return result
        finally:
            if not cut:
                await asyncio.shield(self.give_up(hold_id, task_id))
            elif not final:
                await asyncio.shield(self.release(hold_id))

    async def level(self, hold_s: float, *, without: Iterable[bytes] = ()) -> int:
        """Tries once to bring all shards to the same numbers, and holds them there under a final hold.

        Args:
            hold_s: how long from then on; the caller releases it before.
            without: clients whose numbers may be unequal.

        Returns:
            The hold.

        Raises:
            ShardamError: as cut. No shard is held then.
        """
        hold_id, held_level = random_63_bits(), False
        try:
            held = await self._all(
                lambda index: self._cuts.hold(index, cut_pb2.HoldRequest(hold_id=hold_id, hold_s=self._hold_s, final=True))
            )
            await self._advance(hold_id, _targets([answer.clients for answer in held], frozenset(without)))
            await self.renew(hold_id, hold_s)
            held_level = True
            return hold_id
        finally:
            if not held_level:
                await asyncio.shield(self.release(hold_id))

    async def _advance(self, hold_id: int, targets: Mapping[bytes, cut_pb2.HeldClient]) -> None:
        def ask(index: int) -> Coroutine[None, None, cut_pb2.AdvanceResponse]:
            return self._cuts.advance(index, cut_pb2.AdvanceRequest(hold_id=hold_id, targets=targets.values()), self._hold_s)

        try:
            await self._all(ask)
        except StaleState as error:
            behind = [bytes.fromhex(client) for client in error.metadata.get("clients", "").split(",") if client]
            lonely = [client for client in behind if client in targets and not targets[client].heartbeats]
            if lonely and len(lonely) == len(behind):
                error.metadata[LEVEL_BY_NOBODY] = ",".join(client.hex() for client in lonely)
            raise

    async def renew(self, hold_id: int, hold_s: float) -> None:
        """Lengthens a final hold on all shards.

        Raises:
            ShardamError: it has ended on a shard, or one did not answer.
        """
        await self._all(
            lambda index: self._cuts.hold(index, cut_pb2.HoldRequest(hold_id=hold_id, hold_s=hold_s, final=True, renews=True))
        )

    async def release(self, hold_id: int) -> None:
        """Ends a hold on all shards; one that does not answer ends it by itself."""
        await self._try_all("released", lambda index: self._cuts.release(index, cut_pb2.ReleaseRequest(hold_id=hold_id)))

    async def give_up(self, hold_id: int, task_id: int) -> None:
        """Ends a hold, and gives up what shards write."""
        await self.release(hold_id)
        await self.drop(task_id)

    async def drop(self, task_id: int) -> None:
        """Gives up what shards write, all of it with id zero; one that does not answer does so when it is told again."""
        await self._try_all(
            "told to give its files up", lambda index: self._cuts.drop_task(index, cut_pb2.DropTaskRequest(task_id=task_id))
        )

    async def _all(self, call: Callable[[int], Coroutine[None, None, T]]) -> list[T]:
        """Calls all shards at once; raises the first error once all have ended."""
        answers = await asyncio.gather(*(call(index) for index in self._cuts.shards), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _try_all(self, what: str, call: Callable[[int], Coroutine[None, None, object]]) -> None:
        answers = await asyncio.gather(*(call(index) for index in self._cuts.shards), return_exceptions=True)
        for index, answer in enumerate(answers):
            if isinstance(answer, ShardamError):
                logger.warning("shard %d could not be %s: %s", index, what, answer.message)
            elif isinstance(answer, BaseException):
                raise answer


class Tries:
    """When a cut that failed is tried again, and which clients it goes on without."""

    def __init__(self) -> None:
        self.without: set[bytes] = set()
        self._deadline = time.monotonic() + MAX_TRY_S
        self._wait_s = FIRST_WAIT_S

    async def wait_after(self, error: ShardamError) -> None:
        """Waits after a try that failed.

        Raises:
            ShardamError: the error, if no further try can help.
        """
        hopeless = not error.rule.retryable or error.reason == "CHECKPOINT_FAILED"
        if hopeless or time.monotonic() > self._deadline:
            raise error
        self.without |= {bytes.fromhex(client) for client in error.metadata.get(LEVEL_BY_NOBODY, "").split(",") if client}
        logger.info("the state could not be cut (%s); tried again", error.message)
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s)


def _check_one_root(root_ids: Sequence[str]) -> None:
    """Checks that all shards see the same folder.

    Raises:
        BadOption: they do not.
    """
    without = [index for index, root_id in enumerate(root_ids) if not root_id]
    if without:
        raise BadOption(f"shards {without} have no folder for checkpoints: start all with the same --checkpoint-dir")
    others = [index for index, root_id in enumerate(root_ids) if root_id != root_ids[0]]
    if others:
        raise BadOption(
            f"shards {others} have another folder for checkpoints than shard 0: give all the same --checkpoint-dir, on a "
            "volume that their hosts share"
        )


def _targets(held: Sequence[Iterable[cut_pb2.HeldClient]], without: frozenset[bytes]) -> dict[bytes, cut_pb2.HeldClient]:
    """Returns the highest number of each client on any shard."""
    targets: dict[bytes, cut_pb2.HeldClient] = {}
    for clients in held:
        for client in clients:
            known = targets.get(client.client_id)
            if client.client_id not in without and (known is None or known.last_number < client.last_number):
                targets[client.client_id] = client
    return {client_id: client for client_id, client in targets.items() if client.last_number}


def _merged(
    hold_id: int, task_id: int, created_unix_s: float, answers: Sequence[cut_pb2.CutResponse], without: frozenset[bytes]
) -> CutResult:
    """Puts together what shards have cut.

    Raises:
        StaleState: not the same changes everywhere (HOLD_EXPIRED), such as a client that was settled meanwhile.
    """
    numbers: dict[bytes, set[int]] = {}  # a shard does not list a client that is over there: it lacks nothing
    for answer in answers:
        for client in answer.clients:
            numbers.setdefault(client.client_id, set()).add(client.last_number)
    tables: dict[int, common_pb2.TableInfo] = {}
    for answer in answers:
        for table in answer.tables:
            merged = tables.setdefault(table.table_id, common_pb2.TableInfo())
            num_rows = merged.num_rows + table.num_rows
            if merged.table_id and merged.table_step != table.table_step:
                raise _unequal(f"table {table.spec.name!r} is at step {merged.table_step} and at step {table.table_step}")
            merged.CopyFrom(table)
            merged.num_rows = num_rows
    if any(len(answer.tables) != len(tables) for answer in answers):
        raise _unequal("a table is not on all shards yet")
    for client_id, found in numbers.items():
        if client_id not in without and len(found) > 1:
            raise _unequal(f"client {client_id.hex()} has numbers {sorted(found)}")
    return CutResult(
        hold_id,
        task_id,
        created_unix_s,
        tuple(answer.header.change_number for answer in answers),
        tuple(sorted(tables.values(), key=lambda table: table.spec.name)),
        {client_id: min(found) for client_id, found in numbers.items()},
        sum(answer.size_bytes for answer in answers),
    )


def _unequal(what: str) -> StaleState:
    return StaleState(f"shards were cut at unequal changes: {what}; cut again", reason="HOLD_EXPIRED")
