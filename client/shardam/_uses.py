"""What a forward asks of a table and what it gets: ids as they are grouped, and the rows they need as a small matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardam._arrays import Int64s, Values, as_flat_row_ids, some
from shardam_kernels import native
from shardam_proto.errors import WrongShape

if TYPE_CHECKING:
    from shardam._module import TableModule


@dataclasses.dataclass(frozen=True, eq=False)
class Bags:
    """How the ids of a forward are grouped, checked.

    Attributes:
        offsets: int64 [B], or [B + 1] where the module includes the last one.
        weights: one float32 weight for each id, or None.
    """

    offsets: Int64s
    weights: torch.Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """One use of a table in a forward.

    Attributes:
        module: who uses it.
        row_ids: int64 [*], checked.
        device: of the output.
        bags: how a bag module groups the ids; None: not at all.
    """

    module: TableModule
    row_ids: Int64s
    device: torch.device
    bags: Bags | None = None

    @property
    def training(self) -> bool:
        """True: backward shall record the rows' gradient."""
        return self.module.trainable and torch.is_grad_enabled()


@dataclasses.dataclass(frozen=True, eq=False)
class CompactRows:
    """The rows that a forward needs of a table, as a small weight matrix.

    Attributes:
        rows: float32 [U, dim].
        places: int64 [*], each id's position in rows.
        padding_place: position of the padding row in rows, if it is there.
    """

    rows: torch.Tensor
    places: torch.Tensor
    padding_place: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class TableIds:
    """What the uses of a table need of it.

    Attributes:
        row_ids: int64 [N], the uses' ids one after the other, with a padding row behind them where there are bags: torch sums
            a bag in another order when it is told of one, so it must always be there.
        has_bags: distinct ids shall be sorted. torch's backward of bags sorts places, not stably, and sums in the order that
            comes of it: with places that sort as the ids do, its bits are those of the whole table.
    """

    row_ids: Int64s
    has_bags: bool

    @classmethod
    def of(cls, uses: Sequence[Use]) -> TableIds:
        """Returns those of a table's uses."""
        parts = [use.row_ids.reshape(-1) for use in uses]
        padding = uses[0].module.padding_idx
        has_bags = any(use.bags is not None for use in uses)
        if padding is not None and has_bags:
            parts.append(np.array([padding], np.int64))
        return cls(parts[0] if len(parts) == 1 else np.concatenate(parts), has_bags)

    def distinct(self, num_shards: int) -> tuple[Int64s, Int64s]:
        """Returns each id once, and the place of each of row_ids among them.

        Args:
            num_shards: those of each shard lie behind one another, unless they are sorted.
        """
        if self.has_bags:
            return np.unique(self.row_ids, return_inverse=True)
        distinct, places, _ = native.distinct_ids(self.row_ids, num_shards)
        return distinct, places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TableIds) and self.has_bags == other.has_bags and np.array_equal(self.row_ids, other.row_ids)

    __hash__ = None  # type: ignore[assignment]  # nobody needs one

    def copy(self) -> TableIds:
        """Returns a copy; row_ids may be memory of the program's."""
        return TableIds(self.row_ids.copy(), self.has_bags)


def checked_offsets(offsets: torch.Tensor | Values, num_ids: int, who: str) -> Int64s:
    """Returns offsets as int64 [B]; torch reads memory that is not its own when they are wrong.

    Raises:
        WrongShape: they do not start with 0, decrease, or exceed the number of ids; or there are none for some ids.
        WrongIdDtype: they are no integers.
    """
    starts = as_flat_row_ids(offsets.cpu() if isinstance(offsets, torch.Tensor) else offsets, "offsets")
    if starts.size == 0 and num_ids:
        raise WrongShape(f"{who}: {num_ids} ids and no offsets; say where each bag starts, the first one at 0")
    if starts.size and (starts[0] != 0 or starts[-1] > num_ids or (np.diff(starts) < 0).any()):
        raise WrongShape(
            f"{who}: offsets must start with 0, never decrease (no bag has a negative count) and not exceed the number of ids, "
            f"{num_ids}; got {some(starts)}, the last one {starts[-1]}"
        )
    return starts


def place_of(row_id: int | None, distinct: Int64s) -> int | None:
    """Returns an id's position among distinct ids, or None if it is not there."""
    if row_id is None:
        return None
    places = np.flatnonzero(distinct == row_id)
    return int(places[0]) if places.size else None


def places_among(row_ids: Int64s, known: Int64s) -> Int64s:
    """Returns each id's position among distinct ids, and -1 for one that is not there.

    Args:
        row_ids: int64 [N].
        known: int64 [U], distinct.
    """
    _, places, _ = native.distinct_ids(np.concatenate([known, row_ids]))  # the known ones come first, so they keep their places
    places = places[known.size :]
    return np.where(places < known.size, places, -1)
