"""What an optimizer step is for each of its rows; shared by all implementations, knows no device."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels.hashing import row_keys, step_streams


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What the stochastic rounding of new weights is drawn from (CONTRACT.md, Dtypes).

    Attributes:
        table_seed: the table's seed, 0 to 2**64 - 1.
        row_ids: int64 [U], the rows' ids.
        steps: int64 [U], the step that each row takes now, from 1: t, or the row's own step in row step mode.
    """

    table_seed: int
    row_ids: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]

    def streams(self) -> npt.NDArray[np.uint64]:
        """Returns what each row's hashes are made from, uint64 [U]."""
        return step_streams(row_keys(self.table_seed, self.row_ids), self.steps)


@dataclasses.dataclass(frozen=True)
class RowSteps:
    """The step of each row of an update.

    Attributes:
        factors: float32 [U], s of each row: `Factors.step_factors(U)` in table step mode, else
            `factors.row_step_factors(options, steps)`. Where it is 0 the moments move and the weight does not.
        rounding: given if and only if the weights are not float32.
    """

    factors: npt.NDArray[np.float32]
    rounding: Rounding | None = None

    def check(self, dtype: str) -> None:
        """Checks that there is a rounding exactly where weights of this dtype need one.

        Raises:
            ValueError: it is missing or superfluous.
        """
        if dtype == "float32" and self.rounding is not None:
            raise ValueError("float32 weights are not rounded: give no rounding")
        if dtype != "float32" and self.rounding is None:
            raise ValueError(f"weights of {dtype} are rounded stochastically: give a Rounding of seed, row ids and steps")
