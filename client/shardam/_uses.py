"""What a forward asks of a table and what it gets: ids as they are grouped, and the rows they need as a small matrix."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardam._arrays import Int64s, Values, as_flat_row_ids, some
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
    """Returns an id's position among sorted ids, or None if it is not there."""
    if row_id is None:
        return None
    place = int(np.searchsorted(distinct, row_id))
    return place if place < distinct.size and distinct[place] == row_id else None
