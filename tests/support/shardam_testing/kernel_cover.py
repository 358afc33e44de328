"""The cases of the conformance suite over all implementations, and the program that each of them runs.

A case is a dtype, an option, a dim and the length of the longest run of duplicates; every pair of two values of different
parameters is in some case. The program is the same for every implementation, whatever its process: it returns digests of
everything that can be seen of a table, in the order in which it was seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import AdamOptions, Factors, factors, row_step_factors
from shardam_kernels.initializers import FoldedInit, InitialRows, fold_constant, fold_normal, fold_uniform
from shardam_kernels.row_steps import Rounding, RowSteps

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
RowsOf = Callable[[Int64s], tuple[Int64s, RowSteps]]
"""Gives slots and steps of distinct row ids, in the order that an implementation has them."""


class CoverTable(Protocol):
    """A table of one implementation, pushed to as a shard would."""

    def initialize(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> int: ...

    def push(self, row_ids: Int64s, gradients: Float32s, factors: Factors, rows_of: RowsOf) -> int: ...

    def gather(self, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> Float32s: ...

    def read(self, name: str, slots: Int64s) -> Float32s: ...

    def write(self, name: str, slots: Int64s, values: Float32s) -> int: ...

    def all_bytes(self) -> npt.NDArray[np.uint8]: ...


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a value of the parameter `option` stands for."""

    options: AdamOptions
    grad_scale: float = 1.0
    contributions: int = 1
    row_steps: bool = False


SETTINGS = {
    "plain": Setting(AdamOptions(lr=0.05)),
    "maximize": Setting(AdamOptions(lr=0.05, maximize=True)),
    "coupled": Setting(AdamOptions(lr=0.05, weight_decay=0.03), grad_scale=8.0),
    "decoupled": Setting(AdamOptions(lr=0.05, weight_decay=0.03, decoupled_weight_decay=True)),
    "scaled": Setting(AdamOptions(lr=0.05, betas=(0.0, 0.5), eps=1e-20), grad_scale=3.0),
    "mean": Setting(AdamOptions(lr=0.05, eps=1e-3), contributions=3),
    "row steps": Setting(AdamOptions(lr=0.05), row_steps=True),
    "lr zero": Setting(AdamOptions(lr=0.0, betas=(0.5, 0.0))),
    "everything": Setting(AdamOptions(0.05, (0.6, 0.9), 1e-6, 0.1, True, True), 1024.0, 5, row_steps=True),
}

PARAMETERS: dict[str, tuple[object, ...]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "option": tuple(SETTINGS),
    "dim": (1, 3, 10, 64, 128, 513),
    "run_length": (1, 2, 5, 33, 300, 5000),  # 33: the shortest that a GPU sums apart
}

INITS: tuple[FoldedInit, ...] = (fold_normal(0.1, 0.5), fold_uniform(-1.0, 0.25), fold_constant(-0.3))

NUM_SLOTS = 24
NUM_PUSHES = 3
FIRST_STEP = 3


@dataclasses.dataclass(frozen=True)
class CoverCase:
    """One case; its number seeds its data."""

    number: int
    dtype: str
    option: str
    dim: int
    run_length: int

    def __str__(self) -> str:
        return f"{self.number}-{self.dtype}-{self.option}-{self.dim}-{self.run_length}".replace(" ", "_")


def _pairs(values: tuple[object, ...]) -> Iterator[tuple[int, int, object, object]]:
    for (i, first), (j, second) in itertools.combinations(enumerate(values), 2):
        yield i, j, first, second


def _values_to_add(combination: tuple[object, ...]) -> int:
    _, _, dim, run_length = combination
    return int(str(dim)) * int(str(run_length))


def cover() -> list[CoverCase]:
    """Returns cases that hold every pair; each next one is the combination with the most pairs not yet held.

    Among equals the one with the least to add comes first, so that long runs meet wide rows no oftener than they must.
    """
    combinations = sorted(
        itertools.product(*PARAMETERS.values()), key=lambda combination: int(str(combination[2])) * int(str(combination[3]))
    )
    missing = {pair for combination in combinations for pair in _pairs(combination)}
    cases: list[CoverCase] = []
    while missing:
        best = max(combinations, key=lambda combination: sum(pair in missing for pair in _pairs(combination)))
        missing -= set(_pairs(best))
        dtype, option, dim, run_length = best
        cases.append(CoverCase(len(cases), str(dtype), str(option), int(str(dim)), int(str(run_length))))
    return cases


def run_case(case: CoverCase, table: CoverTable) -> list[tuple[str, str]]:
    """Runs a case on a new table of NUM_SLOTS records and returns (what, digest) of all that was seen.

    Raises:
        AssertionError: a row that no push named has changed.
    """
    rng = np.random.default_rng(case.number)
    row_ids = np.concatenate([[-(2**63), 2**63 - 1, 2**53 + 1, 0], rng.integers(-(2**62), 2**62, NUM_SLOTS - 4)])
    slot_of = dict(zip(row_ids.tolist(), rng.permutation(NUM_SLOTS).tolist(), strict=True))
    initial = InitialRows(INITS[case.number % len(INITS)], 17 + case.number, padding_idx=0)
    slots = np.array([slot_of[row_id] for row_id in row_ids.tolist()])
    seen: list[tuple[str, str]] = []

    def see(what: str, value: npt.NDArray[np.generic] | int) -> None:
        seen.append((what, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()))

    see("saturated by initialize", table.initialize(slots, row_ids, initial))
    see("new rows", table.all_bytes())
    # A trained state: moments that are not zero, weights of which some are huge.
    shape = (NUM_SLOTS // 2, case.dim)
    moments = (rng.standard_normal(shape) * 1e-2).astype(np.float32)
    table.write("exp_avg", slots[: len(moments)], moments)
    table.write("exp_avg_sq", slots[: len(moments)], moments**2 + np.float32(1e-9))
    see("saturated by write", table.write("weight", slots[:2], np.full((2, case.dim), 3.4e38, np.float32)))
    for t in range(FIRST_STEP, FIRST_STEP + NUM_PUSHES):
        _push(case, table, t, row_ids, slot_of, rng, see)
        see(f"records after step {t}", table.all_bytes())
    asked = np.array([slots[3], -1, slots[5], slots[3], -1])
    see("gather", table.gather(asked, np.array([row_ids[3], 77, row_ids[5], row_ids[3], -(2**40)]), initial))
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        see(name, table.read(name, np.array([-1, slots[7], slots[0]])))
    return seen


def _push(
    case: CoverCase,
    table: CoverTable,
    t: int,
    row_ids: Int64s,
    slot_of: dict[int, int],
    rng: np.random.Generator,
    see: Callable[[str, npt.NDArray[np.generic] | int], None],
) -> None:
    setting = SETTINGS[case.option]
    step = factors(setting.options, t, grad_scale=setting.grad_scale, contributions=setting.contributions)
    named = rng.permutation(row_ids)[: NUM_SLOTS - 6]
    # The longest run is in the last push: the interpreter takes seconds for it.
    run_length = case.run_length if t == FIRST_STEP + NUM_PUSHES - 1 else min(case.run_length, 40)
    repeats = np.concatenate([[run_length], rng.integers(1, min(case.run_length, 4) + 1, len(named) - 1)])
    pushed = rng.permutation(np.repeat(named, repeats))
    gradients = _gradients(rng, len(pushed), case.dim)

    def rows_of(distinct: Int64s) -> tuple[Int64s, RowSteps]:
        steps = distinct % 5 + 1 if setting.row_steps else np.full(len(distinct), t)
        s = row_step_factors(setting.options, steps) if setting.row_steps else step.step_factors(len(distinct))
        s[distinct == named[0]] *= np.float32(1e30)  # some weights leave their dtype
        rounding = None if case.dtype == "float32" else Rounding(99, distinct, steps)
        return np.array([slot_of[row_id] for row_id in distinct.tolist()]), RowSteps(s, rounding)

    before = table.all_bytes()
    see(f"saturated in step {t}", table.push(pushed, gradients, step, rows_of))
    untouched = [slot for row_id, slot in slot_of.items() if row_id not in set(named.tolist())]
    assert (table.all_bytes()[untouched] == before[untouched]).all(), "a row that was not named has changed"


def _gradients(rng: np.random.Generator, count: int, dim: int) -> Float32s:
    """Of many magnitudes, some so small that their squares are denormal, some zero of either sign."""
    gradients = rng.standard_normal((count, dim)) * 10.0 ** rng.integers(-3, 3, (count, 1))
    gradients[rng.random(count) < 0.1] *= 1e-20
    gradients[rng.random((count, dim)) < 0.05] = 0.0
    gradients[rng.random((count, dim)) < 0.05] = -0.0
    return gradients.astype(np.float32)
