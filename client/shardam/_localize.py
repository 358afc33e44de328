"""localize: a copy of a model that needs no cluster, for serving and torch.export."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from shardam._arrays import Float32s, Int64s
from shardam._local_modules import (
    LocalCollection,
    LocalEmbedding,
    LocalEmbeddingBag,
    LocalEmbeddingBagById,
    LocalEmbeddingById,
    LocalModule,
    LocalOutput,
    Unknown,
)
from shardam._module import TableModule
from shardam._uses import place_of
from shardam.cluster import Cluster
from shardam.collection import EmbeddingCollection
from shardam.embedding_bag import EmbeddingBag
from shardam.optimizer import SparseAdam
from shardam.table import Table
from shardam_proto.errors import BadOption

ModelT = TypeVar("ModelT", bound=nn.Module)

_UNKNOWN = ("zero", "error")


def localize(model: nn.Module, *, unknown: Unknown = "zero") -> nn.Module:
    """Returns a deep copy of a model in which shardam's modules are torch modules that hold their rows as of now.

    A bounded table becomes a torch.nn.Embedding or EmbeddingBag with a row for every id (those never written: their initial
    weight); an unbounded one keeps the rows that exist, found by their sorted ids. Weights are float32; modules of one table
    share them. The copy takes tensors, gives the same bits as the model, works under torch.export.export, and knows of no
    cluster; its state_dict loads with weights_only. Rows come a page at a time: for rows of one moment, pause the training.

    Args:
        model: a model that has shardam's modules, or one of these.
        unknown: what an id of an unbounded table gives that has no row: "zero", a row of zeros, where the table has its
            initial weight; or "error".

    Raises:
        BadOption: model is no module, or something in it needs the cluster and is no shardam module; the message names it.
        ShardUnreachable, ShardLost: as Table.pull.
    """
    if not isinstance(model, nn.Module):
        raise BadOption(f"localize takes a torch module, got {type(model).__name__}")
    if unknown not in _UNKNOWN:
        raise BadOption(f"localize: unknown must be one of {_UNKNOWN}, got {unknown!r}")
    places: dict[int, object] = {}
    copies = _Copies(unknown)
    found = [model, *(value for _, value in _attributes(model))]
    for value in found:
        if isinstance(value, TableModule):
            places[id(value)] = copies.of(value)
    for value in found:
        if isinstance(value, EmbeddingCollection):
            places[id(value)] = _with_modes(value, LocalCollection({name: copies.of(value[name]) for name in value.features}))
    local = copy.deepcopy(model, places)  # a deep copy takes what its memo has for an object instead of copying it
    for name, value in _attributes(local):
        if isinstance(value, (Cluster, Table, TableModule, EmbeddingCollection, SparseAdam)):
            raise BadOption(
                f"localize: {type(model).__name__}.{name} is a {type(value).__name__}, which needs the cluster; keep it "
                "outside of the model, or take it out before"
            )
    return local


@dataclasses.dataclass(frozen=True, eq=False)
class _TableRows:
    """A table's rows; those of an unbounded one with a last row of zeros, and their ids, sorted."""

    weight: Float32s
    row_ids: Int64s | None


class _Copies:
    """Makes one local module for each of shardam's, and one weight for each table, device and kind of training."""

    def __init__(self, unknown: Unknown) -> None:
        self._unknown = unknown
        self._modules: dict[TableModule, LocalModule] = {}
        self._tables: dict[tuple[Cluster, int], _TableRows] = {}
        self._weights: dict[tuple[Cluster, int, torch.device, bool], nn.Parameter] = {}

    def of(self, module: TableModule) -> LocalModule:
        """Returns a module's local copy."""
        if module not in self._modules:
            self._modules[module] = _with_modes(module, self._make(module))
        return self._modules[module]

    def _make(self, module: TableModule) -> LocalModule:
        rows, weight = self._rows_of(module.table), self._weight_of(module)
        output = LocalOutput(module.output_dtype, moves_ids=module.device is not None)
        padding = module.padding_idx if rows.row_ids is None else place_of(module.padding_idx, rows.row_ids)
        local: LocalEmbedding | LocalEmbeddingBag
        if isinstance(module, EmbeddingBag):
            local = LocalEmbeddingBag(weight, module.mode, module.include_last_offset, padding, output)
        else:
            local = LocalEmbedding(weight, padding, output)
        if rows.row_ids is None:
            return local
        row_ids = torch.from_numpy(rows.row_ids).to(weight.device)
        if isinstance(local, LocalEmbeddingBag):
            return LocalEmbeddingBagById(row_ids, local, self._unknown)
        return LocalEmbeddingById(row_ids, local, self._unknown)

    def _weight_of(self, module: TableModule) -> nn.Parameter:
        device = module.device or torch.device("cpu")
        key = (module.table.cluster, module.table.info().table_id, device, module.trainable)
        if key not in self._weights:
            weight = torch.from_numpy(self._rows_of(module.table).weight).to(device)
            self._weights[key] = nn.Parameter(weight, requires_grad=module.trainable)
        return self._weights[key]

    def _rows_of(self, table: Table) -> _TableRows:
        key = (table.cluster, table.info().table_id)
        if key not in self._tables:
            self._tables[key] = _read(table)
        return self._tables[key]


def _read(table: Table) -> _TableRows:
    if table.spec.num_embeddings is not None:
        return _TableRows(table.pull(np.arange(table.spec.num_embeddings)), None)
    pages = [(rows.row_ids, rows.weight) for rows in table.scan()]
    padding = table.spec.padding_idx
    if padding is not None and not any((ids == padding).any() for ids, _ in pages):
        pages.append((np.array([padding]), table.pull([padding])))  # a bag must be told where it is
    row_ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in pages)])
    weight = np.concatenate([*(weight for _, weight in pages), np.zeros((1, table.dim), np.float32)])
    order = np.argsort(row_ids)
    return _TableRows(weight[[*order, row_ids.size]], row_ids[order])


def _with_modes(module: nn.Module, local: ModelT) -> ModelT:
    """Returns the copy, in training or evaluation mode as the module is."""
    return local.train(module.training)


def _attributes(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields all that a model's modules have, by name: modules, other attributes, and what is in lists and dicts of these."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        yield prefix or "<model>", module
        waiting: list[tuple[str, object]] = [
            (f"{prefix}.{name}" if prefix else name, value)
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
        ]
        while waiting:
            name, value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield name, value
            if isinstance(value, dict):
                waiting += [(f"{name}[{key!r}]", entry) for key, entry in value.items()]
            elif isinstance(value, (list, tuple, set)):
                waiting += [(f"{name}[{index}]", entry) for index, entry in enumerate(value)]
            elif isinstance(value, nn.Module) and not isinstance(value, TableModule):
                waiting += [(f"{name}.{child}", entry) for child, entry in value.named_children()]
