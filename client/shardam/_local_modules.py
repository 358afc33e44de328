"""What localize() puts in the place of shardam's modules: torch modules that hold their rows, and know of no cluster.

They take the same arguments (tensors only) and give the same bits, on the weight's device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from shardam._features import Feature, KeyedJagged, jagged_features
from shardam_proto.errors import UnknownRow

Unknown = Literal["zero", "error"]
"""What an id without a row gives: a row of zeros, or an error."""

BagMode = Literal["sum", "mean", "max"]

MAX_IDS_IN_ERROR = 8
"""Ids an error message lists at most."""


@dataclasses.dataclass(frozen=True)
class LocalOutput:
    """Where a module's output goes.

    Attributes:
        dtype: rows are float32 until the last moment.
        moves_ids: True: ids may be on another device than the weight; False: as in torch, they must be on the same.
    """

    dtype: torch.dtype
    moves_ids: bool


class LocalEmbedding(nn.Embedding):
    """A torch.nn.Embedding that takes ids of any integer dtype.

    Args:
        weight: float32 [N, dim]; may be shared with other modules.
        padding_idx: as in torch.
        output: where the output goes.
    """

    def __init__(self, weight: nn.Parameter, padding_idx: int | None, output: LocalOutput) -> None:
        super().__init__(weight.shape[0], weight.shape[1], padding_idx, _weight=weight)
        self.weight = weight
        self.output = output

    def forward(self, row_ids: Tensor) -> Tensor:
        """Looks rows up: integers [*] to [*, dim]."""
        return super().forward(_as_index(row_ids, self)).to(self.output.dtype)


class LocalEmbeddingBag(nn.EmbeddingBag):
    """A torch.nn.EmbeddingBag that takes ids of any integer dtype, and bags [B, L] also with include_last_offset.

    Args:
        weight: float32 [N, dim]; may be shared with other modules.
        mode: as in torch.
        include_last_offset: as in torch.
        padding_idx: as in torch.
        output: where the output goes.
    """

    def __init__(
        self, weight: nn.Parameter, mode: BagMode, include_last_offset: bool, padding_idx: int | None, output: LocalOutput
    ) -> None:
        super().__init__(
            weight.shape[0],
            weight.shape[1],
            mode=mode,
            _weight=weight,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
        self.weight = weight
        self.output = output

    def forward(self, row_ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Combines each bag's rows, as torch's does.

        Args:
            row_ids: integers [N] with offsets, or [B, L].
            offsets: integers [B], or [B + 1] with include_last_offset.
            per_sample_weights: of the ids' shape; mode "sum" only.

        Returns:
            [B, dim].
        """
        index = _as_index(row_ids, self)
        if index.ndim == 2 and offsets is None:
            num_bags, length = index.shape
            offsets = torch.arange(num_bags + self.include_last_offset, device=index.device) * length
            index = index.reshape(-1)
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        if offsets is not None:
            offsets = _as_index(offsets, self)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(self.weight)
        return super().forward(index, offsets, per_sample_weights).to(self.output.dtype)


class _ByRowId(nn.Module):
    """Finds the rows of an unbounded table by their ids.

    Args:
        row_ids: int64 [N], sorted.
        local: has those rows, and a last one of zeros.
        unknown: what an id gives that is not there.
    """

    row_ids: Tensor

    def __init__(self, row_ids: Tensor, local: LocalEmbedding | LocalEmbeddingBag, unknown: Unknown) -> None:
        super().__init__()
        self.register_buffer("row_ids", row_ids)
        self.local = local
        self.unknown = unknown

    def places_of(self, row_ids: Tensor) -> Tensor:
        """Returns where the rows lie; the row of zeros for ids that are not there.

        Raises:
            UnknownRow: an id is not there, and unknown is "error"; in an exported program torch raises a RuntimeError.
        """
        wanted = _as_index(row_ids, self.local)
        num_rows = self.row_ids.shape[0]
        if num_rows:
            places = torch.searchsorted(self.row_ids, wanted.contiguous()).clamp(max=num_rows - 1)
            known = self.row_ids[places] == wanted
        else:
            places, known = torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
        if self.unknown == "error":
            self._require(known, wanted)
        return torch.where(known, places, num_rows)

    def _require(self, known: Tensor, wanted: Tensor) -> None:
        if torch.compiler.is_compiling():
            torch._assert_async(known.all(), "an id has no row here (localize was told unknown='error')")
            return
        missing = wanted[~known]
        if missing.numel():
            listed = ", ".join(map(str, missing[:MAX_IDS_IN_ERROR].tolist()))
            raise UnknownRow(
                f"{missing.numel()} ids have no row here, among them {listed}; they had none when localize was called: "
                "localize again, or with unknown='zero' for rows of zeros"
            )


class LocalEmbeddingById(_ByRowId):
    """An Embedding of an unbounded table, with the rows that existed."""

    def forward(self, row_ids: Tensor) -> Tensor:
        """Looks rows up: integers [*] to [*, dim]."""
        rows: Tensor = self.local(self.places_of(row_ids))
        return rows


class LocalEmbeddingBagById(_ByRowId):
    """An EmbeddingBag of an unbounded table, with the rows that existed; a row of zeros counts in a mean or maximum."""

    def forward(self, row_ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Combines each bag's rows; see LocalEmbeddingBag."""
        bags: Tensor = self.local(self.places_of(row_ids), offsets, per_sample_weights)
        return bags


LocalModule = LocalEmbedding | LocalEmbeddingBag | LocalEmbeddingById | LocalEmbeddingBagById


class LocalCollection(nn.Module):
    """An EmbeddingCollection of local modules.

    Args:
        modules: by feature; one may stand for several.
    """

    def __init__(self, modules: Mapping[str, LocalModule]) -> None:
        super().__init__()
        distinct = list(dict.fromkeys(modules.values()))
        self.distinct_modules = nn.ModuleList(distinct)
        self._index_of = {feature: distinct.index(module) for feature, module in modules.items()}
        bags = {
            feature: module.local if isinstance(module, LocalEmbeddingBagById) else module
            for feature, module in modules.items()
            if isinstance(module, (LocalEmbeddingBag, LocalEmbeddingBagById))
        }
        self._bags = tuple(bags)
        self._without_last_offset = tuple(
            feature for feature, bag in bags.items() if isinstance(bag, LocalEmbeddingBag) and not bag.include_last_offset
        )

    def forward(self, features: Mapping[str, Feature] | KeyedJagged) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Looks all features up; arguments and results are those of shardam.EmbeddingCollection, with tensors only."""
        outputs: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for feature, (row_ids, offsets, weights) in jagged_features(
            features, self._index_of, self._without_last_offset
        ).items():
            module = self.distinct_modules[self._index_of[feature]]
            if feature in self._bags:
                outputs[feature] = module(row_ids, offsets, weights)
            elif isinstance(offsets, Tensor):
                outputs[feature] = (module(row_ids), offsets)
            else:
                outputs[feature] = module(row_ids)
        return outputs


def _as_index(row_ids: Tensor, module: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    """Returns ids or offsets as int64, on the weight's device if the module is to move them."""
    output = module.output
    if isinstance(output, LocalOutput) and output.moves_ids:
        row_ids = row_ids.to(module.weight.device)
    return row_ids.to(torch.int64)
