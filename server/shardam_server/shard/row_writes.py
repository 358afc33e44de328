"""Rows to be written, and what is refused of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_proto.errors import BadOption, NonFiniteState, WrongShape
from shardam_proto.schema import TableSpec
from shardam_server.shard.records import Float32s, Int64s

MAX_IDS_IN_ERROR = 8
"""Ids an error message lists at most."""

MAX_TABLE_STEP = 2**62
"""Largest step that a table may be set to: steps are kept as int64, and as many again are beyond any training."""

MAX_ROW_STEP = 2**31
"""Largest step that a row may be set to: row steps are kept as uint32, and as many again are beyond any training."""


@dataclasses.dataclass(frozen=True)
class RowWrite:
    """Rows to be written.

    Attributes:
        row_ids: int64 [N], distinct.
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim], or None: an old row keeps its own, a new one gets zero.
        exp_avg_sq: as exp_avg.
        if_absent: leave rows that exist as they are.
        row_steps: uint32 [N], each row's own step; None: as exp_avg.
        table_step: the table's step after it; None: it stays.
    """

    row_ids: Int64s
    weight: Float32s
    exp_avg: Float32s | None = None
    exp_avg_sq: Float32s | None = None
    if_absent: bool = False
    row_steps: npt.NDArray[np.uint32] | None = None
    table_step: int | None = None

    def only(self, chosen: npt.NDArray[np.bool_]) -> RowWrite:
        """Returns the write of some of the rows."""
        return dataclasses.replace(
            self,
            row_ids=self.row_ids[chosen],
            weight=self.weight[chosen],
            exp_avg=None if self.exp_avg is None else self.exp_avg[chosen],
            exp_avg_sq=None if self.exp_avg_sq is None else self.exp_avg_sq[chosen],
            row_steps=None if self.row_steps is None else self.row_steps[chosen],
        )


def check_values(spec: TableSpec, write: RowWrite) -> None:
    """Refuses values that no row may have.

    Raises:
        WrongShape: an id is named twice.
        NonFiniteState: a value is not finite, or exp_avg_sq is negative.
    """
    if np.unique(write.row_ids).size != write.row_ids.size:
        raise WrongShape(f"table {spec.name!r}: a row is named twice in one assign; name each id once")
    columns = {"weight": write.weight, "exp_avg": write.exp_avg, "exp_avg_sq": write.exp_avg_sq}
    for name, values in columns.items():
        if values is None:
            continue
        bad = ~np.isfinite(values).all(axis=1)
        if name == "exp_avg_sq":
            bad |= (values < 0).any(axis=1)
        if bad.any():
            rule = "finite and not negative" if name == "exp_avg_sq" else "finite"
            raise NonFiniteState(
                f"table {spec.name!r}: {name} must be {rule}; it is not for ids {some_ids(write.row_ids[bad])}",
                metadata={"table": spec.name, "row_ids": some_ids(write.row_ids[bad]), "column": name},
            )


def check_steps(spec: TableSpec, step: int, write: RowWrite) -> None:
    """Refuses steps that do not go with the table.

    Args:
        spec: the table's schema.
        step: its present step.
        write: the rows.

    Raises:
        BadOption: rows of this table have no steps, the table has stepped differently, or a step is too large.
    """
    if write.row_steps is not None:
        if spec.step != "row":
            raise BadOption(
                f"table {spec.name!r} has one step for all rows (step={spec.step!r}), so row_steps cannot be set; leave "
                "row_steps out and set table_step, or create the table with step='row'",
                metadata={"table": spec.name},
            )
        too_large = write.row_steps > MAX_ROW_STEP
        if too_large.any():
            raise BadOption(
                f"table {spec.name!r}: row_steps must be at most {MAX_ROW_STEP}; it is {write.row_steps.max()} among ids "
                f"{some_ids(write.row_ids[too_large])}",
                metadata={"table": spec.name, "row_ids": some_ids(write.row_ids[too_large])},
            )
    if write.table_step is None:
        return
    if write.table_step > MAX_TABLE_STEP:
        raise BadOption(
            f"table {spec.name!r}: table_step must be at most {MAX_TABLE_STEP}, got {write.table_step}",
            metadata={"table": spec.name},
        )
    if step not in (0, write.table_step):
        raise BadOption(
            f"table {spec.name!r} is at step {step}, table_step={write.table_step} would move it; import into a table that has "
            "not stepped yet, or leave table_step out to keep the table's own",
            metadata={"table": spec.name, "table_step": str(step)},
        )


def some_ids(row_ids: Int64s) -> str:
    """Lists the first distinct ids for a message."""
    distinct = list(dict.fromkeys(int(row_id) for row_id in row_ids[: 64 * MAX_IDS_IN_ERROR]))
    text = ", ".join(str(row_id) for row_id in distinct[:MAX_IDS_IN_ERROR])
    return text if len(distinct) <= MAX_IDS_IN_ERROR else f"{text}, ..."
