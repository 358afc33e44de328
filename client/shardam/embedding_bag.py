"""torch.nn.EmbeddingBag whose rows live on shards."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
import torch
import torch.nn.functional as functional

from shardam._arrays import Int64s, Values, check_flag
from shardam._lookup import look_up
from shardam._module import Output, TableModule, dtype_name_of
from shardam._pretrained import fill, pretrained_weight
from shardam._uses import Bags, CompactRows, Use, checked_offsets
from shardam.cluster import Cluster
from shardam_proto.errors import BadOption, WrongShape
from shardam_proto.schema import DtypeName, Initializer, Normal, TableSpec

Mode = Literal["sum", "mean", "max"]

_MODES = ("sum", "mean", "max")
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EmbeddingBag(TableModule):
    """Sums, averages or takes the maximum over bags of rows of a table; the table is created if it does not exist.

    Without parameters, as Embedding is; what is said there holds here, too. Every id of a batch is named in the push, in mode
    "max" those that were not the maximum, too: their gradient is zero, and their moments move them.

    Args:
        num_embeddings: ids are 0 .. num_embeddings - 1; None: any int64.
        embedding_dim: elements of a row.
        max_norm: only None.
        norm_type: only 2.0.
        scale_grad_by_freq: only False.
        mode: "mean", "sum" or "max".
        sparse: only True.
        _weight: only None; see from_pretrained.
        include_last_offset: offsets end with the number of ids.
        padding_idx: row that counts in no bag, starts at zero and is never written by a push; negative counts from the end if
            bounded.
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
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = True,
        _weight: None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
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
        self._check_neutral(table, {**given, "_weight": _weight})
        if mode not in _MODES:
            raise BadOption(f"EmbeddingBag of table {table!r}: mode must be one of {_MODES}, got {mode!r}")
        if not isinstance(include_last_offset, bool):
            raise BadOption(f"EmbeddingBag of table {table!r}: include_last_offset must be a bool, got {include_last_offset!r}")
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
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
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
        """Makes a module of a bounded table with given rows; see Embedding.from_pretrained.

        Raises:
            BadOption, SchemaMismatch: as the constructor.
            WrongShape, NonFiniteState, RedisUnreachable: as Embedding.from_pretrained.
        """
        check_flag(freeze, f"{cls.__name__} of table {table!r}: freeze")
        check_flag(overwrite, f"{cls.__name__} of table {table!r}: overwrite")
        weight = pretrained_weight(embeddings, table)
        module = cls(
            weight.shape[0],
            weight.shape[1],
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            None,
            include_last_offset,
            padding_idx,
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
    def forward(
        self,
        row_ids: torch.Tensor | Values,
        offsets: torch.Tensor | Values | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pulls the rows of a batch of bags and combines each bag's.

        Args:
            row_ids: integers [N] with offsets, or [B, L]: B bags of L ids.
            offsets: [B] where each bag of row_ids [N] starts, or [B + 1] with include_last_offset; the first is 0.
            per_sample_weights: a weight for each id, of the ids' shape; mode "sum" only. They may require grad.

        Returns:
            [B, embedding_dim] of output_dtype, on `device` or the ids' device; zeros for an empty bag.

        Raises:
            WrongShape: ids without offsets, offsets that fit no bags, or weights of another shape.
            BadOption: weights in another mode or of another dtype; else as Embedding.
            WrongIdDtype, IdOutOfRange, ShardUnreachable, ShardLost: as Embedding.
        """
        return look_up([self._use(row_ids, offsets, per_sample_weights)])[0]

    def _use(
        self,
        row_ids: torch.Tensor | Values,
        offsets: torch.Tensor | Values | None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> Use:
        if isinstance(row_ids, torch.Tensor) and row_ids.is_nested:
            raise self._wrong("row_ids is a nested tensor; hand in row_ids.values() and row_ids.offsets()[:-1]")
        ids, device = self._ids(row_ids)
        weights = self._weights(per_sample_weights, ids, device)
        if ids.ndim == 2:
            if offsets is not None:
                raise self._wrong(f"row_ids of shape {ids.shape} are bags of {ids.shape[1]} each; leave offsets out")
            num_bags, length = ids.shape
            starts = np.arange(num_bags + self.include_last_offset, dtype=np.int64) * length
            return Use(self, ids.reshape(-1), device, Bags(starts, None if weights is None else weights.reshape(-1)))
        if ids.ndim != 1:
            raise self._wrong(f"row_ids must have shape [N] with offsets, or [B, L], got shape {ids.shape}")
        if offsets is None:
            raise self._wrong(
                f"row_ids has shape {ids.shape} and offsets is missing; say where each bag starts, e.g. offsets=[0, 2] for two "
                "bags, or hand in row_ids of shape [B, L]"
            )
        return Use(self, ids, device, Bags(self._offsets(offsets, ids.size), weights))

    def _offsets(self, offsets: torch.Tensor | Values, num_ids: int) -> Int64s:
        starts = checked_offsets(offsets, num_ids, self._who())
        if self.include_last_offset and (starts.size == 0 or starts[-1] != num_ids):
            raise self._wrong(
                f"with include_last_offset the last offset must be the number of ids, {num_ids}, got {starts[-1:].tolist()}"
            )
        return starts

    def _weights(self, weights: torch.Tensor | None, ids: Int64s, device: torch.device) -> torch.Tensor | None:
        if weights is None:
            return None
        if self.mode != "sum":
            raise BadOption(f"{self._who()}: per_sample_weights go with mode='sum' only, this one has mode={self.mode!r}")
        if not isinstance(weights, torch.Tensor) or weights.dtype not in _WEIGHT_DTYPES:
            found = weights.dtype if isinstance(weights, torch.Tensor) else type(weights).__name__
            raise BadOption(f"{self._who()}: per_sample_weights must be a tensor of one of {_WEIGHT_DTYPES}, got {found}")
        if tuple(weights.shape) != ids.shape:
            raise self._wrong(
                f"per_sample_weights has shape {tuple(weights.shape)} and row_ids has shape {ids.shape}; each id needs one"
            )
        return weights.to(device).float()

    def _combine(self, use: Use, compact: CompactRows) -> torch.Tensor:
        if use.bags is None:
            raise AssertionError("a bag module's use has bags")
        return functional.embedding_bag(
            compact.places,
            compact.rows,
            torch.from_numpy(use.bags.offsets).to(use.device),
            mode=self.mode,
            per_sample_weights=use.bags.weights,
            include_last_offset=self.include_last_offset,
            padding_idx=compact.padding_place,
        )

    def _wrong(self, what: str) -> WrongShape:
        return WrongShape(f"{self._who()}: {what}", metadata={"table": self._table.name})

    def extra_repr(self) -> str:
        """Describes the table, as torch's modules do."""
        last = [f"include_last_offset={self.include_last_offset}"] if self.include_last_offset else []
        return self._describe(f"mode={self.mode!r}", *last)
