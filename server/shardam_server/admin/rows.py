"""Rows and their optimizer state as columns, as shards send them, and as JSON objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardam_proto.routing import buckets_of
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.admin.encoding import Float32s, Json, float32_values
from shardam_server.admin.etags import RowTag, StateId

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows as columns.

    Attributes:
        row_ids: int64 [N].
        found: bool [N]; a row that does not exist has its initial weight and zeros.
        shard: int64 [N], the owner.
        lineage: uint64 [N], the lineage of the owner's state.
        timeline: uint64 [N], the timeline of the owner's state.
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim], or None if not asked for.
        exp_avg_sq: as exp_avg.
        step: int64 [N], the step that enters bias correction.
        last_touched_step: int64 [N], the table's step when a push last touched the row.
        change_number: uint64 [N], the owner's change number when the row last changed.
    """

    row_ids: Int64s
    found: npt.NDArray[np.bool_]
    shard: Int64s
    lineage: npt.NDArray[np.uint64]
    timeline: npt.NDArray[np.uint64]
    weight: Float32s
    exp_avg: Float32s | None
    exp_avg_sq: Float32s | None
    step: Int64s
    last_touched_step: Int64s
    change_number: npt.NDArray[np.uint64]

    def to_json(self) -> list[Json]:
        """Returns one object per row."""
        states = (
            [self.weight] if self.exp_avg is None or self.exp_avg_sq is None else [self.weight, self.exp_avg, self.exp_avg_sq]
        )
        finite = np.logical_and.reduce([np.isfinite(state).all(axis=1) for state in states])
        buckets = buckets_of(self.row_ids)
        return [self._row_to_json(index, int(buckets[index]), bool(finite[index])) for index in range(len(self.row_ids))]

    def take(self, order: Int64s) -> Rows:
        """Returns the rows at the given positions."""
        return Rows(
            row_ids=self.row_ids[order],
            found=self.found[order],
            shard=self.shard[order],
            lineage=self.lineage[order],
            timeline=self.timeline[order],
            weight=self.weight[order],
            exp_avg=None if self.exp_avg is None else self.exp_avg[order],
            exp_avg_sq=None if self.exp_avg_sq is None else self.exp_avg_sq[order],
            step=self.step[order],
            last_touched_step=self.last_touched_step[order],
            change_number=self.change_number[order],
        )

    def tag(self, index: int) -> RowTag:
        """Returns which state of a row this is."""
        owner = StateId(int(self.shard[index]), int(self.lineage[index]), int(self.timeline[index]))
        return RowTag(owner, int(self.change_number[index]))

    def _row_to_json(self, index: int, bucket: int, finite: bool) -> Json:
        row: dict[str, Json] = {
            "id": str(self.row_ids[index]),
            "found": bool(self.found[index]),
            "shard": int(self.shard[index]),
            "bucket": bucket,
            "weight": float32_values(self.weight[index], finite=finite),
        }
        if self.exp_avg is not None and self.exp_avg_sq is not None:
            row["optimizer"] = {
                "exp_avg": float32_values(self.exp_avg[index], finite=finite),
                "exp_avg_sq": float32_values(self.exp_avg_sq[index], finite=finite),
                "step": int(self.step[index]),
            }
        row["last_touched_step"] = int(self.last_touched_step[index])
        row["change_number"] = str(self.change_number[index])
        row["has_nonfinite"] = not finite
        return row


def decode(columns: row_pb2.RowColumns, sender: common_pb2.ResponseHeader, dim: int, include_optimizer: bool) -> Rows:
    """Reads what a shard sent.

    Args:
        columns: the message.
        sender: who sent it.
        dim: elements of a row.
        include_optimizer: the moments were asked for.
    """
    row_ids = np.frombuffer(columns.row_ids, dtype="<i8").astype(np.int64)
    num_rows = len(row_ids)

    def values(data: bytes) -> Float32s:
        return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False).reshape(num_rows, dim)

    return Rows(
        row_ids=row_ids,
        found=np.frombuffer(columns.found, dtype=np.uint8).astype(np.bool_),
        shard=np.full(num_rows, sender.shard, dtype=np.int64),
        lineage=np.full(num_rows, sender.lineage, dtype=np.uint64),
        timeline=np.full(num_rows, sender.timeline, dtype=np.uint64),
        weight=values(columns.weight),
        exp_avg=values(columns.exp_avg) if include_optimizer else None,
        exp_avg_sq=values(columns.exp_avg_sq) if include_optimizer else None,
        step=np.frombuffer(columns.step, dtype="<i8").astype(np.int64),
        last_touched_step=np.frombuffer(columns.last_touched_step, dtype="<i8").astype(np.int64),
        change_number=np.frombuffer(columns.change_number, dtype="<u8").astype(np.uint64),
    )


def no_rows(dim: int, include_optimizer: bool) -> Rows:
    """Returns zero rows of a dim."""
    return decode(row_pb2.RowColumns(), common_pb2.ResponseHeader(), dim, include_optimizer)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Puts rows after each other; at least one part, and all with moments or all without."""

    def optional(columns: list[Float32s | None]) -> Float32s | None:
        present = [column for column in columns if column is not None]
        return np.concatenate(present) if present else None

    return Rows(
        row_ids=np.concatenate([part.row_ids for part in parts]),
        found=np.concatenate([part.found for part in parts]),
        shard=np.concatenate([part.shard for part in parts]),
        lineage=np.concatenate([part.lineage for part in parts]),
        timeline=np.concatenate([part.timeline for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
        exp_avg=optional([part.exp_avg for part in parts]),
        exp_avg_sq=optional([part.exp_avg_sq for part in parts]),
        step=np.concatenate([part.step for part in parts]),
        last_touched_step=np.concatenate([part.last_touched_step for part in parts]),
        change_number=np.concatenate([part.change_number for part in parts]),
    )
