"""What workers contribute to steps, and what has to become of a step; by the contract, in NumPy, knowing nothing of shards."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_proto.routing import RouteMap
from shardam_proto.schema import Normal, TableSpec
from shardam_server.shard.groups.values import Kind
from shardam_testing.reference_table import Float32s, Int64s

NUM_SHARDS = 3
NUM_RANKS = 3

SPECS = (
    TableSpec("words", 2, init=Normal()),
    TableSpec("users", 4, init=Normal(), dtype="bfloat16", step="row", num_embeddings=12, padding_idx=0),
)
"""Both step modes, both widths of weights, with and without bounds and padding. Their ids are 1, 2."""

ROW_IDS = np.arange(12, dtype=np.int64)
"""So few that ranks meet on rows; each shard has some, and the first three one each."""

OWNERS = RouteMap(1, NUM_SHARDS).shards_of(ROW_IDS)

GRADIENT_LIMIT = 2.0**64
"""CONTRACT.md, Refusal."""

LARGE_SCALE = 2.0**100
"""With it, a sum of two gradients is beyond float32 and yet, once unscaled, far below the limit."""

Plan = Literal["gradient", "empty", "abstain", "nan", "huge", "lr", "scale"]
"""What a worker does: besides the kinds, a gradient that is refused, one of 2**63, and one with other hyper-parameters."""

PLANS: tuple[Plan, ...] = ("gradient", "empty", "abstain", "nan", "huge", "lr", "scale")

Gradient = tuple[Int64s, Float32s]
"""Ids, duplicates among them, and a row for each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Content:
    """What one client sends as one number.

    Attributes:
        step: the step it is for.
        rank: the client's.
        kind: what it contributes.
        tables: table id -> gradient of all shards; empty unless kind is gradient.
        options: hyper-parameters of all tables.
        grad_scale: loss scale.
        digest: of the content.
        refused: whether it cannot be applied by itself.
    """

    step: int
    rank: int
    kind: Kind
    tables: Mapping[int, Gradient]
    options: AdamOptions
    grad_scale: float
    digest: bytes
    refused: bool

    def part(self, shard: int) -> dict[int, Gradient]:
        """Returns what goes to one shard: every table, with the rows that are there."""
        parts = {}
        for table_id, (row_ids, gradients) in self.tables.items():
            here = OWNERS[row_ids] == shard
            parts[table_id] = row_ids[here], np.ascontiguousarray(gradients[here])
        return parts


def scale_of(step: int) -> float:
    """Returns the loss scale of a step."""
    return (LARGE_SCALE, 2.0, LARGE_SCALE, 0.5)[step % 4]


def make_content(plan: Plan, step: int, rank: int, seed: Sequence[int]) -> Content:
    """Makes a content at random."""
    rng = np.random.default_rng(seed)
    options = AdamOptions(lr=0.1 / step, weight_decay=0.01, decoupled_weight_decay=step % 2 == 1)
    scale = scale_of(step)
    kind: Kind = plan if plan in ("empty", "abstain") else "gradient"
    tables: dict[int, Gradient] = {}
    if kind == "gradient":
        first = int(rng.integers(2))
        for table_id in (1, 2)[first : first + int(rng.integers(1, 3))]:
            row_ids = (rng.random(int(rng.integers(0, 7))) ** 2 * ROW_IDS.size).astype(np.int64)  # the first more often
            tables[table_id] = row_ids, rng.standard_normal((row_ids.size, SPECS[table_id - 1].dim)).astype(np.float32)
    if plan == "nan":
        beyond = GRADIENT_LIMIT * scale if scale < LARGE_SCALE else np.inf
        _spoil(tables, int(rng.integers(1, 3)), int(rng.integers(1, 6)), rng.choice([np.nan, -np.inf, beyond]))
    elif plan == "huge":  # of two, sums are too large: unscaled, or as they are
        large = 1.25 * 2.0**63 * scale if scale < LARGE_SCALE else 1.5 * 2.0**127
        _spoil(tables, 1, step % NUM_SHARDS, large * rng.choice([1, 1, 1, 1, 1, -1]))
    elif plan == "lr":
        options = dataclasses.replace(options, lr=float(np.nextafter(options.lr, 1)))
    elif plan == "scale":
        scale *= 2
    digest = hashlib.sha256(repr((plan, step, rank, seed)).encode()).digest()[:16]
    refused = any(is_refused(sum_rank(SPECS[table_id - 1], *gradient).values(), scale) for table_id, gradient in tables.items())
    return Content(step, rank, kind, tables, options, scale, digest, refused)


def _spoil(tables: dict[int, Gradient], table_id: int, row_id: int, value: float) -> None:
    """Puts a value into a row's gradient."""
    dim = SPECS[table_id - 1].dim
    row = np.zeros((1, dim), np.float32)
    row[0, 0] = value
    row_ids, gradients = tables.get(table_id, (ROW_IDS[:0], np.zeros((0, dim), np.float32)))
    keep = row_ids != row_id
    tables[table_id] = np.append(row_ids[keep], row_id), np.concatenate([gradients[keep], row])


def sum_rank(spec: TableSpec, row_ids: Int64s, gradients: Float32s) -> dict[int, Float32s]:
    """Sums one rank's gradients of each row in the order of the push, from the first one; without the padding row."""
    sums: dict[int, Float32s] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for row_id, gradient in zip(row_ids.tolist(), gradients, strict=True):
            if row_id != spec.padding_idx:
                sums[row_id] = sums[row_id] + gradient if row_id in sums else gradient
    return sums


def is_refused(rows: Iterable[Float32s], scale: float) -> bool:
    """Whether sums of gradients may not be applied."""
    with np.errstate(over="ignore", invalid="ignore"):
        return any(not (np.abs(row * np.float32(1 / scale)) < np.float32(GRADIENT_LIMIT)).all() for row in rows)
