"""One conformance suite over NumPy, C++ and Triton: the same bits for every dtype, option, dim and length of a run.

The cases and their program are in shardam_testing.kernel_cover. Triton's kernels are interpreted, in a process of their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.interpreter import InterpreterProcess
from shardam_testing.kernel_cover import NUM_SLOTS, PARAMETERS, CoverCase, RowsOf, cover, run_case
from shardam_testing.kernels import Float32s, Int64s, NativeTable, ReferenceTable, table_bytes

from shardam_kernels.factors import Factors

CASES = cover()


class PushedReference(ReferenceTable):
    """The reference as a shard uses it: merge, then update."""

    def push(self, row_ids: Int64s, gradients: Float32s, factors: Factors, rows_of: RowsOf) -> int:
        merged = self.merge(row_ids, gradients, factors)
        slots, steps = rows_of(merged.row_ids)
        return self.update(slots, merged.gradients, factors, steps)

    def all_bytes(self) -> npt.NDArray[np.uint8]:
        return table_bytes(self)


class PushedNative(NativeTable):
    """The native kernels, likewise."""

    def push(self, row_ids: Int64s, gradients: Float32s, factors: Factors, rows_of: RowsOf) -> int:
        merged = self.merge(row_ids, gradients, factors)
        slots, steps = rows_of(merged.row_ids)
        return self.update(slots, merged.gradients, factors, steps)

    def all_bytes(self) -> npt.NDArray[np.uint8]:
        return table_bytes(self)


@functools.cache
def expected(case: CoverCase) -> list[tuple[str, str]]:
    return run_case(case, PushedReference(case.dim, NUM_SLOTS, case.dtype))


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InterpreterProcess]:
    with InterpreterProcess(tmp_path_factory.mktemp("interpreter") / "log") as process:
        yield process


def test_the_cover_holds_every_pair_of_values_in_at_most_120_cases() -> None:
    assert len(CASES) <= 120
    for first, second in itertools.combinations(PARAMETERS, 2):
        held = {(getattr(case, first), getattr(case, second)) for case in CASES}
        assert held == set(itertools.product(PARAMETERS[first], PARAMETERS[second]))


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_code_sees_what_the_reference_sees(case: CoverCase, num_threads: int) -> None:
    assert run_case(case, PushedNative(case.dim, NUM_SLOTS, case.dtype, num_threads)) == expected(case)


@pytest.mark.case("C023")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_sees_what_the_reference_sees(case: CoverCase, interpreter: InterpreterProcess) -> None:
    assert interpreter.run(case.number) == expected(case)
