"""The gradient of one step and the rule by which it is refused (CONTRACT.md, Refusal); shared by all implementations."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

GRADIENT_LIMIT = 2.0**64
"""A merged, unscaled value of this magnitude is refused: its square overflows float32."""

DECAYED_GRADIENT_LIMIT = 2.0**64 - 2.0**40
"""The largest float32 below GRADIENT_LIMIT; a gradient with coupled weight decay is clamped to it."""

ACCEPT_LIMIT = 2.0**63
"""max|g| * longest run * max(1, unscale) below this proves that no sum reaches GRADIENT_LIMIT, rounding included."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """One gradient per distinct id.

    Attributes:
        row_ids: int64 [U], distinct, in order of first appearance.
        gradients: float32 [U, dim]; each the left-to-right sum of its id's gradients, then unscaled, then divided.
        bad_rows: int64 [B], ascending positions in row_ids with a value that, merged and unscaled (before the division of
            a mean), is NaN or at least GRADIENT_LIMIT in magnitude. Not empty: the step must be refused.
    """

    row_ids: npt.NDArray[np.int64]
    gradients: npt.NDArray[np.float32]
    bad_rows: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Runs:
    """The gradients of a step grouped by id but not summed, for kernels that sum a run while they update its row.

    Attributes:
        row_ids: int64 [U], distinct, in ascending order of the length of their runs, then of first appearance.
        starts: int32 [U + 1]; the run of row u is order[starts[u]:starts[u + 1]].
        order: int32 [N], positions in the step's gradients, ascending within a run.
        bad_rows: int64 [B], as in Merged.
    """

    row_ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    order: npt.NDArray[np.int32]
    bad_rows: npt.NDArray[np.int64]
