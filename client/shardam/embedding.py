"""torch.nn.Embedding whose rows live on shards."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as functional

from shardam._arrays import Values, check_flag
from shardam._lookup import look_up
from shardam._module import Output, TableModule, dtype_name_of
from shardam._pretrained import fill, pretrained_weight
from shardam._uses import CompactRows, Use
from shardam.cluster import Cluster
from shardam_proto.schema import DtypeName, Initializer, Normal, TableSpec


class Embedding(TableModule):
    """Looks up rows of a table; the table is created if it does not exist.

    The module has no parameters: DDP, FSDP and dense optimizers pass it over, and so do `model.zero_grad()` and
    `model.requires_grad_(False)` of a model around it: use the SparseAdam's zero_grad, and freeze(). All modules of one table
    in a program share one gradient, pushed by the SparseAdam that has them. A deep copy shares the table; a pickle carries the
    cluster's address and the table's name, and connects by itself when it is first used.

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
        dtype: stored dtype, by name or as torch's.
        step: "table": one step count for the table, as torch; "row": one for each row.
        device: device of the output; None: that of the ids.
        output_dtype: dtype of the output; rows are float32 until the last moment, and so are sums of gradients.
        trainable: False: the rows never get a gradient; see freeze().

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
        given = {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        self._check_neutral(table, given)
        spec = TableSpec(
            name=table,
            dim=embedding_dim,
            dtype=dtype_name_of(dtype),
            init=Normal() if init is None else init,
            num_embeddings=num_embeddings,
            padding_idx=padding_idx,
            step=step,
        )
        super().__init__(cluster, spec, Output(device, output_dtype), trainable)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        table: str,
        cluster: Cluster,
        overwrite: bool = False,
        init: Initializer | None = None,
        dtype: DtypeName | torch.dtype = "float32",
        step: Literal["table", "row"] = "table",
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Makes a module of a bounded table with given rows.

        `embeddings` is [num_embeddings, dim], float32 or 16-bit floats; its padding row is written as given, as in torch. Rows
        that exist stay as they are, so a restarted job goes on where it was; with `overwrite` they are written, too, and their
        moments are zero again. Of several workers that call this at the same time one writes all rows, and the others wait for
        it. `freeze` makes a module that is not trained. The other arguments are the constructor's.

        Raises:
            BadOption, SchemaMismatch: as the constructor.
            WrongShape: embeddings is no matrix.
            NonFiniteState: a value is not finite; nothing was written.
            RedisUnreachable: the workers could not agree on who writes.
        """
        check_flag(freeze, f"{cls.__name__} of table {table!r}: freeze")
        check_flag(overwrite, f"{cls.__name__} of table {table!r}: overwrite")
        weight = pretrained_weight(embeddings, table)
        module = cls(
            weight.shape[0],
            weight.shape[1],
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            table=table,
            cluster=cluster,
            init=init,
            dtype=dtype,
            step=step,
            device=device,
            output_dtype=output_dtype,
            trainable=not freeze,
        )
        fill(module.table, weight, overwrite=overwrite)
        return module

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
    def forward(self, row_ids: torch.Tensor | Values) -> torch.Tensor:
        """Pulls the rows of a batch of ids.

        With gradients enabled (in eval mode, too, as in torch), backward records the rows' gradient for SparseAdam. Under
        no_grad, or if not trainable, nothing is kept. Inside a backward (activation checkpointing) no shard is asked: the rows
        are those of the training forward.

        Args:
            row_ids: integer tensor or array of any shape [*].

        Returns:
            [*, embedding_dim] of output_dtype, on `device` or the ids' device.

        Raises:
            BadOption: gradients are enabled and no SparseAdam, or more than one, has the table; or inside a backward other ids
                are asked for than the training forward pulled.
            WrongIdDtype: ids are no integers.
            IdOutOfRange: an id lies outside a bounded table.
            ShardUnreachable, ShardLost: as Table.pull.
        """
        return look_up([self._use(row_ids)])[0]

    def _use(self, row_ids: torch.Tensor | Values) -> Use:
        ids, device = self._ids(row_ids)
        return Use(self, ids, device)

    def _combine(self, use: Use, compact: CompactRows) -> torch.Tensor:
        # torch gives the padding row no gradient
        return functional.embedding(compact.places, compact.rows, padding_idx=compact.padding_place)

    def extra_repr(self) -> str:
        """Describes the table, as torch's modules do."""
        return self._describe()
