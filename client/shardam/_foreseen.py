"""Rows of coming forwards, pulled ahead of them, and what a forward takes of them.

A batch's rows are asked for before it is trained on (_prefetch.py says which). Forwards take what they find here and pull the
rest. Where results must be those of plain pulls, the rows are brought up to date before a forward has them.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from shardam._arrays import Float32s, Int64s
from shardam._forks import FORKS
from shardam._gradient import TableGradient
from shardam._own_reads import read_own_changed, read_own_weights
from shardam._reads import PendingRead, Versions, read_weights_later
from shardam._uses import TableIds, places_among
from shardam.cluster import Cluster
from shardam_proto.errors import ShardamError, ShardUnreachable


@dataclasses.dataclass(frozen=True, eq=False)
class Wanted:
    """What a forward needs of a table.

    Attributes:
        gradient: the table's gradient.
        row_ids: int64 [U], distinct.
    """

    gradient: TableGradient
    row_ids: Int64s


class _ForeseenTable:
    """One table's rows of one batch.

    Args:
        gradient: the table's gradient.
        ids: as the batch has them; copied, since the batch is the program's.
        num_shards: by which the distinct ones are put in order.
    """

    def __init__(self, gradient: TableGradient, ids: TableIds, num_shards: int) -> None:
        self.pulled_at = gradient.num_steps
        self.ids = ids.copy()
        self.distinct, self.places = ids.distinct(num_shards)
        self.is_taken = False


class ForeseenRows:
    """A batch's rows of one cluster, on their way or there.

    Args:
        cluster: the cluster.
        ids: of each table, as the batch has them.
        exact: forwards bring the rows up to date. In a group they always do: a step's rows are those after the step before.
        max_steps: steps of a table after which rows that are not brought up to date are too old to be taken: a batch may be
            trained on more than once, and a loop that was left may still be alive.

    Attributes:
        cluster: the cluster.
        session: its client; rows that one has pulled are not another's.
        grad_enabled: whether forwards with gradients take them, or those without.
    """

    def __init__(self, cluster: Cluster, ids: dict[TableGradient, TableIds], *, exact: bool, max_steps: int) -> None:
        self.exact = exact or cluster.mode != "async"
        self._max_steps = max_steps
        self.session = cluster._session
        self.grad_enabled = torch.is_grad_enabled()
        self.cluster = cluster
        self._tables = {
            gradient: _ForeseenTable(gradient, of_table, cluster._num_shards_known) for gradient, of_table in ids.items()
        }
        self._places = {gradient: place for place, gradient in enumerate(self._tables)}
        self._read: Future[tuple[list[Float32s], Versions]] = Future()

    def pull(self) -> None:
        """Pulls the rows, in a thread of the prefetch's; a failure is told to who waits for them.

        Without `exact` the pushes that are queued now are waited for, and no step of a group ever is.
        """
        try:
            if not self.exact:
                self.cluster._pusher.wait_for_queued()
            wanted = [(gradient.info, table.distinct) for gradient, table in self._tables.items()]
            pending: PendingRead = read_weights_later(self.session, wanted)
            rows = pending.result()
        except BaseException as error:  # noqa: BLE001 - the forward raises it, in another thread
            self._read.set_exception(error)
        else:
            self._read.set_result((rows, pending.versions))

    def give_up(self) -> None:
        """Has whoever waits for the rows pull them: the loop has ended."""
        self._read.set_exception(ShardUnreachable("the prefetch ended before it pulled these rows"))

    def has(self, gradient: TableGradient) -> bool:
        """True: rows of the table are here, and not too old."""
        table = self._tables.get(gradient)
        return table is not None and (self.exact or gradient.num_steps - table.pulled_at <= self._max_steps)

    def distinct_of(self, gradient: TableGradient, ids: TableIds) -> tuple[Int64s, Int64s] | None:
        """Returns distinct ids and places, if these ids are those of the batch."""
        table = self._tables.get(gradient)
        return (table.distinct, table.places) if table is not None and table.ids == ids else None

    def versions(self) -> Versions | None:
        """Waits for the rows; None: they could not be pulled, and a pull of the forward's own will say why."""
        try:
            return self._read.result()[1]
        except ShardamError:
            return None

    def take(self, wanted: Wanted) -> tuple[Int64s | None, Float32s]:
        """Returns positions in the wanted ids, None: all, and their rows, which nobody writes to unless they are exact."""
        table = self._tables[wanted.gradient]
        rows = self._read.result()[0][self._places[wanted.gradient]]
        if wanted.row_ids is table.distinct:
            first, table.is_taken = not table.is_taken, True
            return None, rows if first or not self.exact else rows.copy()
        places = places_among(wanted.row_ids, table.distinct)
        found = np.flatnonzero(places >= 0)
        return (None if found.size == places.size else found), rows[places[found]]


class _ActiveRows:
    """The rows of the batches that this process's programs are at, by cluster. Thread-safe."""

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Cluster, tuple[ForeseenRows, ...]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()

    def replace(self, cluster: Cluster, old: ForeseenRows | None, new: ForeseenRows | None) -> None:
        with self._lock:
            if cluster not in self._rows:
                FORKS.add_heir(self)
            kept = tuple(rows for rows in self._rows.get(cluster, ()) if rows is not old)
            self._rows[cluster] = kept if new is None else (*kept, new)

    def of(self, cluster: Cluster) -> list[ForeseenRows]:
        """Returns those that a forward of now may take, the latest batch first: under no_grad, those of a prefetch begun so."""
        found = self._rows.get(cluster)
        if not found:
            return []
        client = cluster._client
        session, grad_enabled = None if client is None else client[0], torch.is_grad_enabled()
        return [rows for rows in reversed(found) if rows.session is session and rows.grad_enabled == grad_enabled]


_ACTIVE = _ActiveRows()


def activate(cluster: Cluster, old: ForeseenRows | None, new: ForeseenRows | None) -> None:
    """Has forwards take the rows of another batch."""
    _ACTIVE.replace(cluster, old, new)


def foreseen_ids(cluster: Cluster, gradient: TableGradient, ids: TableIds) -> tuple[Int64s, Int64s] | None:
    """Returns distinct ids and places of a table's ids, if they were foreseen as they are."""
    for rows in _ACTIVE.of(cluster):
        known = rows.distinct_of(gradient, ids)
        if known is not None:
            return known
    return None


def take_foreseen(cluster: Cluster, wanted: Sequence[Wanted], training: bool) -> list[Float32s] | None:
    """Returns the rows of a forward, float32 [U, dim] of each table; what was not foreseen is pulled.

    Args:
        cluster: the cluster.
        wanted: each table once.
        training: as for read_weights.

    Returns:
        None: nothing of it was foreseen.

    Raises:
        ShardamError: as Session.answer; or an earlier queued push failed.
    """
    active = _ACTIVE.of(cluster)
    owners = [next((rows for rows in active if rows.has(each.gradient)), None) for each in wanted]
    if not any(owners):
        return None
    return _Taking(cluster, training).rows(wanted, owners)


class _Taking:
    """One forward's rows, gathered from what was foreseen and from a pull of what was not."""

    def __init__(self, cluster: Cluster, training: bool) -> None:
        self._cluster = cluster
        self._training = training
        self._missing: list[tuple[Float32s, Int64s | None, Wanted]] = []

    def rows(self, wanted: Sequence[Wanted], owners: Sequence[ForeseenRows | None]) -> list[Float32s]:
        results = [np.empty((0, 0), np.float32)] * len(wanted)
        for batch in dict.fromkeys(owners):
            indexes = [index for index, owner in enumerate(owners) if owner is batch]
            for index, rows in zip(indexes, self._of_batch(batch, [wanted[index] for index in indexes]), strict=True):
                results[index] = rows
        self._pull_missing()
        return results

    def _of_batch(self, batch: ForeseenRows | None, wanted: Sequence[Wanted]) -> list[Float32s]:
        versions = None if batch is None else self._versions(batch)
        if batch is None or versions is None:
            return [self._all_missing(each) for each in wanted]
        taken = [batch.take(each) for each in wanted]
        if batch.exact:
            self._bring_up_to_date(versions, wanted, taken)
        return [self._complete(each, *part) for each, part in zip(wanted, taken, strict=True)]

    def _versions(self, batch: ForeseenRows) -> Versions | None:
        with self._cluster._timings.measured("foreseen"):
            versions = batch.versions()
        if not batch.exact:
            self._cluster._pusher.raise_error()
            return versions
        return versions if self._cluster._session is batch.session else None

    def _bring_up_to_date(
        self, versions: Versions, wanted: Sequence[Wanted], taken: Sequence[tuple[Int64s | None, Float32s]]
    ) -> None:
        asked = [
            (each.gradient.info, each.row_ids if found is None else each.row_ids[found])
            for each, (found, _) in zip(wanted, taken, strict=True)
        ]
        read_own_changed(self._cluster, asked, versions, [rows for _, rows in taken], training=self._training)

    def _complete(self, wanted: Wanted, found: Int64s | None, rows: Float32s) -> Float32s:
        if found is None:
            return rows
        result = np.empty((wanted.row_ids.size, rows.shape[1]), np.float32)
        result[found] = rows
        others = np.ones(wanted.row_ids.size, np.bool_)
        others[found] = False
        self._missing.append((result, np.flatnonzero(others), wanted))
        return result

    def _all_missing(self, wanted: Wanted) -> Float32s:
        result = np.empty((wanted.row_ids.size, wanted.gradient.info.spec.dim), np.float32)
        self._missing.append((result, None, wanted))
        return result

    def _pull_missing(self) -> None:
        if not self._missing:
            return
        asked = [
            (wanted.gradient.info, wanted.row_ids if places is None else wanted.row_ids[places])
            for _, places, wanted in self._missing
        ]
        pulled = read_own_weights(self._cluster, asked, training=self._training)
        for (result, places, _), rows in zip(self._missing, pulled, strict=True):
            result[slice(None) if places is None else places] = rows
