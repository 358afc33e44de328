"""What a member of a group does in a step: a pure function of the run's seed, the rank, the step and the rows that it pulled.

Gradients depend on the pulled rows, so a pull that saw one push too few or too many changes every bit after it. Some steps test
what a step may end as: all members abstain, or gradients whose sum over the ranks is near the limit, or beyond.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Literal

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_proto.schema import TableSpec
from shardam_testing.faults.sequence import NUM_IDS, OPTIONS, TABLES, Float32s, Int64s

WorkKind = Literal["gradient", "empty", "abstain"]

KINDS: tuple[WorkKind, ...] = ("gradient", "empty", "abstain")

MAX_ROWS = 24
"""Rows of one table's gradient at most."""

MEETING = 0.1
"""Of the geometric distribution of rows: all ranks meet in the first ones, with gradients so unequal that the order counts."""

CYCLE = 16
"""Steps after which each special kind of step comes again."""

LARGE_STEP, TOO_LARGE_STEP, ABSTAINED_STEP = 5, 9, 13
"""Places in the cycle: a sum that only the shards can accept; one that they refuse; one from which all abstain."""

PEAK_ROW = 999_983
"""The row of the large gradients; nothing else names it, since nothing moves it any more."""

LARGE, TOO_LARGE = 1.5 * 2.0**63, 2.5 * 2.0**63
"""Sums over the ranks: home asks the shards from 2**63 on, and 2**64 is refused."""

PULL_FACTOR = np.float32(0.25)
"""How strongly a gradient depends on its row: a power of two, so that the product is exact."""


@dataclasses.dataclass(frozen=True, eq=False)
class TableWork:
    """One table's rows of a step.

    Attributes:
        spec: the table.
        row_ids: what is pulled, and pushed, with duplicates.
        noise: the gradients, but for what the rows add.
    """

    spec: TableSpec
    row_ids: Int64s
    noise: Float32s

    def gradients(self, pulled: Float32s, grad_scale: float) -> Float32s:
        """Returns the gradients [N, dim] of rows as they were pulled."""
        return (self.noise + pulled * PULL_FACTOR) * np.float32(grad_scale)


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """One member's step.

    Attributes:
        kind: what it contributes: "gradient", "empty" or "abstain".
        tables: what it pulls, and pushes if it contributes gradients.
        options: hyper-parameters, the same on all ranks.
        grad_scale: likewise.
    """

    kind: WorkKind
    tables: tuple[TableWork, ...]
    options: AdamOptions
    grad_scale: float


def make_work(seed: int, world_size: int, rank: int, step: int) -> Work:
    """Returns a member's step.

    Args:
        seed: of the run.
        world_size: of the group, at least 2 if sums over the ranks shall be too large.
        rank: of the member.
        step: from 1.
    """
    common, own = np.random.default_rng([seed, step]), np.random.default_rng([seed, step, rank])
    options = OPTIONS[common.integers(len(OPTIONS))]
    place = step % CYCLE
    peak = {LARGE_STEP: LARGE, TOO_LARGE_STEP: TOO_LARGE}.get(place)
    grad_scale = 1.0 if peak is not None else float(common.choice([1.0, 1.0, 1024.0]))
    kind: WorkKind = "abstain" if place == ABSTAINED_STEP else KINDS[own.choice(len(KINDS), p=(0.9, 0.05, 0.05))]
    if peak is not None and world_size > 1:
        return Work("gradient", (_peak(peak / world_size),), options, grad_scale)
    shared = {int(place) for place in common.permutation(len(TABLES))[: common.choice([1, 1, 2])]}
    chosen = sorted(shared | {int(place) for place in own.permutation(len(TABLES))[: own.choice([0, 1])]})
    return Work(kind, tuple(_table_work(own, TABLES[index]) for index in chosen), options, grad_scale)


def digest(pulled: Iterable[Float32s]) -> str:
    """Returns a digest of the bits of a step's pulled rows."""
    state = hashlib.blake2b(digest_size=8)
    for rows in pulled:
        state.update(rows.tobytes())
    return state.hexdigest()


def _peak(value: float) -> TableWork:
    spec = TABLES[0]
    return TableWork(spec, np.array([PEAK_ROW], np.int64), np.full((1, spec.dim), value, np.float32))


def _table_work(rng: np.random.Generator, spec: TableSpec) -> TableWork:
    count = int(rng.integers(1, MAX_ROWS + 1))
    places = np.minimum(rng.geometric(MEETING, count), NUM_IDS).astype(np.int64)
    row_ids = places if spec.num_embeddings is not None else (places - 20) * np.int64(1_000_003)
    scales = np.exp2(rng.integers(-8, 9, (count, 1))).astype(np.float32)
    return TableWork(spec, row_ids, rng.standard_normal((count, spec.dim)).astype(np.float32) * scales)
