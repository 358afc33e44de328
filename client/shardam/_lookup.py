"""The lookups of one forward: one set of distinct ids per table, one pull for all tables of a cluster, rows into the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from shardam._arrays import Float32s, Int64s
from shardam._gradient import KeptRows, PulledRows, TableGradient
from shardam._reads import read_weights
from shardam._uses import CompactRows, Use, place_of
from shardam.cluster import Cluster


@dataclasses.dataclass(eq=False)
class _Group:
    """Uses of one table that share their rows.

    Attributes:
        gradient: the table's gradient.
        cluster: its cluster.
        device: of the rows.
        training: the rows enter the graph.
        indexes: which uses.
        distinct: int64 [U], sorted.
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
        _find_distinct(group, uses)
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(uses)
    for group, rows in zip(groups, _take_rows(groups), strict=True):
        start = 0
        for index in group.indexes:
            use = uses[index]
            places = group.places[start : start + use.row_ids.size].reshape(use.row_ids.shape)
            start += use.row_ids.size
            padding_place = place_of(use.module.padding_idx, group.distinct)
            compact = CompactRows(rows, torch.from_numpy(places).to(group.device), padding_place)
            outputs[index] = use.module._combine(use, compact).to(use.module.output_dtype)
    return outputs


def _grouped(uses: Sequence[Use]) -> list[_Group]:
    """Frozen and trained uses of a table stay apart: an id that is only looked at must not be named in a push."""
    groups: dict[tuple[int, torch.device, bool], _Group] = {}
    for index, use in enumerate(uses):
        gradient = use.module._gradient
        key = (id(gradient), use.device, use.training)
        if key not in groups:
            groups[key] = _Group(gradient, use.module.table.cluster, use.device, use.training, [])
        groups[key].indexes.append(index)
    return list(groups.values())


def _find_distinct(group: _Group, uses: Sequence[Use]) -> None:
    parts = [uses[index].row_ids.reshape(-1) for index in group.indexes]
    padding = group.gradient.info.spec.padding_idx
    if padding is not None and any(uses[index].bags is not None for index in group.indexes):
        # a bag must always have its padding row: torch sums in another order when it is told of one
        parts.append(np.array([padding], np.int64))
    group.distinct, group.places = np.unique(np.concatenate(parts), return_inverse=True)


def _take_rows(groups: Sequence[_Group]) -> list[torch.Tensor]:
    """Returns each group's rows, float32 [U, dim] on its device; those that are trained are in the graph."""
    if torch._C._current_graph_task_id() != -1:
        return [_enter_graph(group, group.gradient.kept_rows(group.distinct)) for group in groups]
    pulled = [torch.from_numpy(weights).to(group.device) for group, weights in zip(groups, _pull(groups), strict=True)]
    return [
        _enter_graph(group, group.gradient.keep(group.distinct, rows)) if group.training else rows
        for group, rows in zip(groups, pulled, strict=True)
    ]


def _enter_graph(group: _Group, kept: KeptRows) -> torch.Tensor:
    rows = kept.rows.to(group.device)
    if not group.training:
        return rows
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
        wanted = [
            (groups[indexes[0]].gradient.info, _union([groups[index].distinct for index in indexes]))
            for indexes in tables.values()
        ]
        weights = read_weights(cluster._ready_to_read(training=training), wanted, training=training)
        for indexes, (_, row_ids), rows in zip(tables.values(), wanted, weights, strict=True):
            for index in indexes:
                distinct = groups[index].distinct
                results[index] = rows if len(indexes) == 1 else rows[np.searchsorted(row_ids, distinct)]
    return results


def _union(row_ids: Sequence[Int64s]) -> Int64s:
    return row_ids[0] if len(row_ids) == 1 else np.unique(np.concatenate(row_ids))
