"""The lookups of one forward: one set of distinct ids per table, one pull for all tables of a cluster, rows into the graph."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch

from shardam._arrays import Float32s, Int64s
from shardam._foreseen import Wanted, foreseen_ids, take_foreseen
from shardam._gradient import KeptRows, LookedUpRows, Lookup, PulledRows, TableGradient
from shardam._own_reads import read_own_weights
from shardam._uses import CompactRows, TableIds, Use, place_of
from shardam.cluster import Cluster
from shardam_kernels import native

_CPU = torch.device("cpu")


@dataclasses.dataclass(eq=False)
class _Group:
    """Uses of one table that share their rows.

    Attributes:
        gradient: the table's gradient.
        cluster: its cluster.
        device: of the rows.
        training: the rows enter the graph.
        indexes: which uses.
        distinct: int64 [U], sorted or by shard; see TableIds.
        places: int64, positions in distinct of the uses' ids, one after the other.
    """

    gradient: TableGradient
    cluster: Cluster
    device: torch.device
    training: bool
    indexes: list[int]
    distinct: Int64s = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    places: Int64s = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))


def look_up(uses: Sequence[Use]) -> list[torch.Tensor]:
    """Computes the outputs of all uses of a forward.

    Raises:
        BadOption: rows shall be trained that no SparseAdam, or more than one, has; or this is a forward inside a backward
            (activation checkpointing) that needs rows which no training forward has pulled.
        ShardUnreachable, ShardLost: as Table.pull.
    """
    groups = _grouped(uses)
    for group in groups:
        if group.training:
            group.gradient.require_owner()
    _find_distinct(groups, uses)
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(uses)
    for group, rows in zip(groups, _take_rows(groups), strict=True):
        if isinstance(rows, KeptRows) and _is_lookup(group, uses):
            (index,) = group.indexes
            outputs[index] = _looked_up(group, uses[index], rows)
            continue
        compact_rows = _into_graph(group, rows) if isinstance(rows, KeptRows) else rows
        start = 0
        for index in group.indexes:
            use = uses[index]
            places = group.places[start : start + use.row_ids.size].reshape(use.row_ids.shape)
            start += use.row_ids.size
            padding_place = place_of(use.module.padding_idx, group.distinct)
            compact = CompactRows(compact_rows, torch.from_numpy(places).to(group.device), padding_place)
            outputs[index] = use.module._combine(use, compact).to(use.module.output_dtype)
    return outputs


def _grouped(uses: Sequence[Use]) -> list[_Group]:
    """Frozen and trained uses of a table stay apart: an id that is only looked at must not be named in a push."""
    groups: dict[tuple[int, torch.device, bool], _Group] = {}
    for index, use in enumerate(uses):
        gradient, training = use.module._gradient, use.training
        key = (id(gradient), use.device, training)
        if key not in groups:
            groups[key] = _Group(gradient, use.module.table.cluster, use.device, training, [])
        groups[key].indexes.append(index)
    return list(groups.values())


def _find_distinct(groups: Sequence[_Group], uses: Sequence[Use]) -> None:
    started = time.perf_counter()
    for group in groups:
        ids = TableIds.of([uses[index] for index in group.indexes])
        known = foreseen_ids(group.cluster, group.gradient, ids)
        group.distinct, group.places = known or ids.distinct(group.cluster._num_shards_known)
    if groups:
        groups[0].cluster._timings.add("unique", time.perf_counter() - started)


def _take_rows(groups: Sequence[_Group]) -> list[torch.Tensor | KeptRows]:
    """Returns each group's rows, float32 [U, dim]; those that are trained are kept for their graph."""
    if torch._C._current_graph_task_id() != -1:
        found = [group.gradient.kept_rows(group.distinct) for group in groups]
        return [kept if group.training else kept.rows.to(group.device) for group, kept in zip(groups, found, strict=True)]
    pulled = [torch.from_numpy(weights).to(group.device) for group, weights in zip(groups, _pull(groups), strict=True)]
    return [
        group.gradient.keep(group.distinct, rows) if group.training else rows
        for group, rows in zip(groups, pulled, strict=True)
    ]


def _is_lookup(group: _Group, uses: Sequence[Use]) -> bool:
    """True: one lookup of ids on a CPU that is trained, whose rows need no step of their own in the graph."""
    return len(group.indexes) == 1 and uses[group.indexes[0]].bags is None and group.device == _CPU


def _looked_up(group: _Group, use: Use, kept: KeptRows) -> torch.Tensor:
    lookup = Lookup(group.gradient, kept, place_of(use.module.padding_idx, group.distinct), group.cluster._timings)
    places = torch.from_numpy(group.places.reshape(use.row_ids.shape))
    rows: torch.Tensor = LookedUpRows.apply(group.gradient.anchor, places, lookup)  # type: ignore[no-untyped-call]
    return rows.to(use.module.output_dtype)


def _into_graph(group: _Group, kept: KeptRows) -> torch.Tensor:
    rows = kept.rows.to(group.device)
    tracked: torch.Tensor = PulledRows.apply(group.gradient.anchor, rows, group.gradient, kept)  # type: ignore[no-untyped-call]
    return tracked


def _pull(groups: Sequence[_Group]) -> list[Float32s]:
    """Pulls the rows of all groups: of each cluster in one read, of each table once.

    A read for training carries the step that this worker is at in its group, and what is only looked at comes with it.
    """
    results: list[Float32s] = [np.empty((0, 0), np.float32)] * len(groups)
    for cluster in dict.fromkeys(group.cluster for group in groups):
        tables: dict[int, list[int]] = {}
        training = any(group.training for group in groups if group.cluster is cluster)
        for index, group in enumerate(groups):
            if group.cluster is cluster:
                tables.setdefault(group.gradient.info.table_id, []).append(index)
        wanted, places = [], []
        for indexes in tables.values():
            row_ids, where = _union([groups[index].distinct for index in indexes])
            wanted.append(Wanted(groups[indexes[0]].gradient, row_ids))
            places.append(where)
        for indexes, where, rows in zip(tables.values(), places, _read(cluster, wanted, training), strict=True):
            for index, of_group in zip(indexes, where, strict=True):
                results[index] = rows if len(indexes) == 1 else rows[of_group]
    return results


def _read(cluster: Cluster, wanted: Sequence[Wanted], training: bool) -> list[Float32s]:
    taken = take_foreseen(cluster, wanted, training)
    if taken is not None:
        return taken
    asked = [(each.gradient.info, each.row_ids) for each in wanted]
    return read_own_weights(cluster, asked, training=training)


def _union(parts: Sequence[Int64s]) -> tuple[Int64s, list[Int64s]]:
    """Returns distinct ids of all parts, and the places of each part's ids among them; of one part alone nobody needs them."""
    if len(parts) == 1:
        return parts[0], [parts[0]]
    distinct, places, _ = native.distinct_ids(np.concatenate(parts))
    return distinct, np.split(places, np.cumsum([part.size for part in parts])[:-1])
