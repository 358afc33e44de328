"""What calls return: tables and rows as plain values."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam._arrays import Float32s, Int64s
from shardam_kernels.factors import AdamOptions
from shardam_proto.schema import TableSpec


@dataclasses.dataclass(frozen=True)
class TableInfo:
    """A created table: what never changes.

    Attributes:
        spec: its schema.
        table_id: random 63 bits, never used again.
        table_seed: seed of the initial weights.
    """

    spec: TableSpec
    table_id: int
    table_seed: int

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name


@dataclasses.dataclass(frozen=True)
class TableStats:
    """A table over all shards, each shard at its own moment.

    Attributes:
        table_step: t on home, shard 0.
        num_rows: rows that exist.
        rows_per_shard: rows on each shard.
        record_bytes: bytes of weights and moments.
        index_bytes: bytes of indexes and per-row counters.
        saturated_values: weights that left their dtype's range.
        nonfinite_pushes: pushes that shards refused for a non-finite gradient (the client refuses its own before).
        last_options: hyper-parameters of the last push, or None.
    """

    table_step: int
    num_rows: int
    rows_per_shard: tuple[int, ...]
    record_bytes: int
    index_bytes: int
    saturated_values: int
    nonfinite_pushes: int
    last_options: AdamOptions | None


@dataclasses.dataclass(frozen=True)
class PushResult:
    """A push that every shard has applied.

    Attributes:
        step: the table's step after it, on home (with several workers another shard may have counted otherwise).
        number: this client's number of the push.
    """

    step: int
    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows as columns, in the order asked for; all arrays are private and writable.

    A row that does not exist (`found` False) has its initial weight, zero moments and step 0.

    Attributes:
        row_ids: int64 [N].
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim].
        exp_avg_sq: float32 [N, dim].
        step: int64 [N], the step that enters bias correction.
        found: bool [N].
    """

    row_ids: Int64s
    weight: Float32s
    exp_avg: Float32s
    exp_avg_sq: Float32s
    step: Int64s
    found: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return int(self.row_ids.size)
