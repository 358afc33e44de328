"""torch.nn.Embedding whose rows live on shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from shardam._arrays import Values, as_row_ids, check_bounds
from shardam._gradient import PulledRows, gradient_of
from shardam.cluster import Cluster
from shardam.table import Table
from shardam_proto.errors import BadOption
from shardam_proto.schema import DtypeName, Initializer, Normal, TableSpec

_NEUTRAL: Mapping[str, tuple[object, str]] = {
    "max_norm": (None, "renormalizing would write rows in a forward pass; clip with sparse.parameters() instead"),
    "norm_type": (2.0, "it only matters with max_norm"),
    "scale_grad_by_freq": (False, "scale the loss instead"),
    "sparse": (True, "gradients of tables on shards are always sparse"),
}
"""torch's other arguments: the only value each may have, and what to do instead."""

_OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Embedding(nn.Module):
    """Looks up rows of a table; the table is created if it does not exist.

    The module has no parameters: DDP, FSDP and dense optimizers pass it over, `model.zero_grad()` and
    `model.requires_grad_()` do not reach it (use the SparseAdam's zero_grad, and trainable=False), and a copy shares the
    table. All modules of one table in a program share one gradient, pushed by the SparseAdam that has them.

    Args:
        num_embeddings: ids are 0 .. num_embeddings - 1; None: any int64.
        embedding_dim: elements of a row.
        padding_idx: row that starts at zero and is never written by a push; negative counts from the end if bounded.
        max_norm: only None.
        norm_type: only 2.0.
        scale_grad_by_freq: only False.
        sparse: only True.
        table: the table's name.
        cluster: the cluster that holds it.
        init: weights of a row before its first push; None: Normal(), as torch.
        dtype: stored dtype, "float32" or torch.float32.
        step: "table", one step count for the table, as torch.
        device: device of the output; None: that of the ids.
        output_dtype: dtype of the output; rows are float32 until the last moment, and so are sums of gradients.
        trainable: False: the rows never get a gradient.

    Raises:
        BadOption: an argument that is not supported; the message has the remedy.
        SchemaMismatch: the table exists with another schema.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        table: str,
        cluster: Cluster,
        init: Initializer | None = None,
        dtype: DtypeName | torch.dtype = "float32",
        step: Literal["table", "row"] = "table",
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        given = {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        for name, value in given.items():
            neutral, remedy = _NEUTRAL[name]
            if value != neutral:
                raise BadOption(f"Embedding of table {table!r}: {name} can only be {neutral!r}, got {value!r}; {remedy}")
        if output_dtype not in _OUTPUT_DTYPES:
            raise BadOption(f"Embedding of table {table!r}: output_dtype must be one of {_OUTPUT_DTYPES}, got {output_dtype!r}")
        if not isinstance(cluster, Cluster):
            raise BadOption(f"Embedding of table {table!r}: cluster must come from connect or LocalCluster, got {cluster!r}")
        spec = TableSpec(
            name=table,
            dim=embedding_dim,
            dtype=_dtype_name(dtype),
            init=Normal() if init is None else init,
            num_embeddings=num_embeddings,
            padding_idx=padding_idx,
            step=step,
        )
        self.device = None if device is None else torch.device(device)
        self.output_dtype = output_dtype
        self.trainable = trainable
        self._attach(cluster.create_table(spec))

    def _attach(self, table: Table) -> None:
        self._table = table
        self._gradient = gradient_of(table.cluster, table.info())

    @property
    def table(self) -> Table:
        """The table."""
        return self._table

    @property
    def num_embeddings(self) -> int | None:
        """Number of rows of a bounded table, else None."""
        return self._table.spec.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """Elements of a row."""
        return self._table.dim

    @property
    def padding_idx(self) -> int | None:
        """The padding row, if there is one."""
        return self._table.spec.padding_idx

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
    def forward(self, row_ids: torch.Tensor | Values) -> torch.Tensor:
        """Pulls the rows of a batch of ids.

        With gradients enabled (and trainable), backward records the rows' gradient for SparseAdam. Otherwise nothing is kept.

        Args:
            row_ids: integer tensor or array of any shape [*].

        Returns:
            [*, embedding_dim] of output_dtype, on `device` or the ids' device.

        Raises:
            BadOption: gradients are enabled and no SparseAdam, or more than one, has the table.
            WrongIdDtype: ids are no integers.
            IdOutOfRange: an id lies outside a bounded table.
            ShardUnreachable, ShardLost: as Table.pull.
        """
        training = self.trainable and torch.is_grad_enabled()
        if training:
            self._gradient.require_owner()
        device = self.device or (row_ids.device if isinstance(row_ids, torch.Tensor) else torch.device("cpu"))
        ids = as_row_ids(row_ids.cpu() if isinstance(row_ids, torch.Tensor) else row_ids)
        check_bounds(ids, self.num_embeddings, self._table.name)
        distinct, places = np.unique(ids, return_inverse=True)
        rows = torch.from_numpy(self._table.pull(distinct)).to(device)
        if training:
            rows = PulledRows.apply(  # type: ignore[no-untyped-call]  # torch has no types here
                self._gradient.anchor, rows, self._gradient, torch.from_numpy(distinct)
            )
        local_ids = torch.from_numpy(places.reshape(ids.shape)).to(device)
        return functional.embedding(local_ids, rows, padding_idx=self._place_of_padding(distinct)).to(self.output_dtype)

    def _place_of_padding(self, distinct: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int | None:
        """Position of the padding row among sorted ids, so that torch gives it no gradient."""
        if self.padding_idx is None:
            return None
        place = int(np.searchsorted(distinct, self.padding_idx))
        return place if place < distinct.size and distinct[place] == self.padding_idx else None

    def extra_repr(self) -> str:
        """Describes the table, as torch's modules do."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, table={self._table.name!r}"

    # -- what a module without parameters cannot do is said

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        """Explains why there is no weight.

        Raises:
            AttributeError: as for every missing attribute, so that hasattr() is False.
        """
        if name == "weight":
            raise AttributeError(
                "shardam.Embedding has no weight: the rows live on shards. Read them with module.table.pull(ids), write them "
                "with module.table.assign(ids, weight)"
            )
        return super().__getattr__(name)

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:
        """Refuses: there is no parameter to set.

        Raises:
            BadOption: always.
        """
        raise BadOption(
            f"Embedding of table {self._table.name!r} has no parameters, so requires_grad_({requires_grad}) would do nothing; "
            f"set module.trainable = {requires_grad}"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Embedding:
        """Returns a module of the same table."""
        copy = type(self).__new__(type(self))
        nn.Module.__init__(copy)
        copy.device, copy.output_dtype, copy.trainable = self.device, self.output_dtype, self.trainable
        copy.training = self.training
        copy._attach(self._table)
        return copy


def _dtype_name(dtype: DtypeName | torch.dtype) -> DtypeName:
    if isinstance(dtype, torch.dtype):
        name: DtypeName = str(dtype).removeprefix("torch.")  # type: ignore[assignment]  # TableSpec checks it
        return name
    return dtype
