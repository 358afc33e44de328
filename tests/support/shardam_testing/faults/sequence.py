"""What a worker of the fault tests changes: a pure function of its seed and the number, so that runs can be compared."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import AdamOptions
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

TABLES = (
    TableSpec("plain", 5),
    TableSpec("by_row", 8, init=Uniform(-0.5, 0.5), step="row"),
    TableSpec("bfloat16", 6, dtype="bfloat16", init=Normal(0, 0.1)),
    TableSpec("float16_by_row", 3, dtype="float16", step="row", padding_idx=0, init=Constant(0.25)),
    TableSpec("bounded", 16, num_embeddings=300, padding_idx=-1),
    TableSpec("wide", 64),
)
"""Every dtype and step mode, hashed and bounded ids, a dim off every vector's width."""

NUM_IDS = 150
"""Distinct ids of a table: few, so that workers meet in rows and rows step often."""

MAX_ROWS = 40
"""Rows of one table's push at most."""

LARGE_EVERY = 24
"""One push in so many is large, if any is."""

NEW_EVERY = 4
"""One push in so many is of new ids, if any is."""

FIRST_NEW_ID = 2**40
"""Ids from here on are named once: drawn from so many, none comes twice."""

OPTIONS = (
    AdamOptions(lr=0.05),
    AdamOptions(lr=0.02, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01),
    AdamOptions(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    AdamOptions(lr=0.0),
)
"""Hyper-parameters change from push to push, as a scheduler changes them."""


@dataclasses.dataclass(frozen=True, eq=False)
class TablePush:
    """One table's gradients of a push."""

    spec: TableSpec
    row_ids: Int64s
    gradients: Float32s
    options: AdamOptions
    grad_scale: float


@dataclasses.dataclass(frozen=True, eq=False)
class Push:
    """One optimizer step."""

    tables: tuple[TablePush, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Assign:
    """Rows written."""

    spec: TableSpec
    row_ids: Int64s
    weight: Float32s
    exp_avg: Float32s | None
    if_absent: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Delete:
    """Rows deleted."""

    spec: TableSpec
    row_ids: Int64s


Change = Push | Assign | Delete


def make_change(seed: int, number: int, *, large_rows: int = 0, new_rows: int = 0) -> Change:
    """Returns a worker's change of a number.

    Args:
        seed: of the worker.
        number: from 1.
        large_rows: rows of each LARGE_EVERY-th push, most of them different, so that it is sent in chunks; 0: none is large.
        new_rows: rows of each NEW_EVERY-th push, of ids that no other change names; 0: no push is of these.
    """
    rng = np.random.default_rng([seed, number])
    if large_rows and number % LARGE_EVERY == 0:
        ids = rng.integers(0, 2 * large_rows, large_rows)
        gradients = rng.standard_normal((large_rows, TABLES[-1].dim)).astype(np.float32)
        return Push((TablePush(TABLES[-1], ids, gradients, OPTIONS[0], 1.0),))
    if new_rows and number % NEW_EVERY == 0:
        ids = rng.integers(FIRST_NEW_ID, 2**63, new_rows)
        gradients = rng.standard_normal((new_rows, TABLES[0].dim)).astype(np.float32)
        return Push((TablePush(TABLES[0], ids, gradients, OPTIONS[1], 1.0),))
    kind = rng.random()
    spec = TABLES[rng.integers(len(TABLES))]
    if kind < 0.04:
        return Delete(spec, np.unique(_ids(rng, spec, 10)))
    if kind < 0.08:
        ids = np.unique(_ids(rng, spec, 10))
        weight, exp_avg = (rng.standard_normal((ids.size, spec.dim)).astype(np.float32) for _ in range(2))
        return Assign(spec, ids, weight, exp_avg if rng.random() < 0.5 else None, if_absent=bool(rng.random() < 0.5))
    count = int(rng.choice([1, 1, 1, 2, len(TABLES)]))
    chosen = [TABLES[place] for place in sorted(rng.permutation(len(TABLES))[:count])]
    return Push(tuple(_table_push(rng, table, int(rng.integers(MAX_ROWS + 1))) for table in chosen))


def _table_push(rng: np.random.Generator, spec: TableSpec, num_rows: int) -> TablePush:
    gradients = rng.standard_normal((num_rows, spec.dim)).astype(np.float32)
    grad_scale = float(rng.choice([1.0, 1.0, 1024.0]))
    options = OPTIONS[rng.choice(len(OPTIONS), p=(0.6, 0.2, 0.15, 0.05))]
    return TablePush(spec, _ids(rng, spec, num_rows), gradients, options, grad_scale)


def _ids(rng: np.random.Generator, spec: TableSpec, count: int) -> Int64s:
    """Returns ids with duplicates; those of unbounded tables lie far apart, some below zero."""
    places = np.minimum(rng.geometric(0.03, count), NUM_IDS).astype(np.int64)
    return places if spec.num_embeddings is not None else (places - 20) * np.int64(1_000_003)
