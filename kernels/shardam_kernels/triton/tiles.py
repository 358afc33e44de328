"""How rows and columns are cut into programs. No choice here changes a bit of any result."""

from __future__ import annotations

import dataclasses

import triton

from shardam_kernels.triton.adam_kernel import adam_update_kernel

INTERPRETED = not isinstance(adam_update_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the import), on CPU tensors."""

LONG_RUN = 32
"""Runs of more gradients have small programs of their own, one warp wide, so that a row's columns are spread over many."""

_THREADS_PER_WARP = 32
_VALUES_PER_LOAD = 4  # float32 in 16 bytes
_WARPS = 4
_MAX_BLOCK = 512  # columns of a program: with one row and 4 warps, 4 values a thread
_MAX_ROWS = 128  # of a program: one a thread
_LONG_BLOCK = 128  # values of a program for long runs: one warp, 16 bytes a thread
_MAX_REGISTERS = 128  # of a thread: where the assembler is left to choose it spills one to get below 41
_LONG_UNROLL = 16  # gradients: more of them the assembler does not load ahead
_INTERPRETED_ROWS = 128  # a program costs the interpreter the same whatever its size ...
_INTERPRETED_VALUES = 1 << 14  # ... up to about here


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program works on.

    Attributes:
        rows: number of rows, a power of two.
        block: number of columns, a power of two.
        warps: warps of a program.
        unroll: gradients of a run that are loaded before the first is added.
    """

    rows: int
    block: int
    warps: int
    unroll: int = 1

    def options(self) -> dict[str, int | bool]:
        """Returns the compiler's options for this tile."""
        return {"num_warps": self.warps, "maxnreg": _MAX_REGISTERS, "enable_fp_fusion": False}

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Returns the number of programs by rows and by columns."""
        return -(-num_rows // self.rows), -(-num_columns // self.block)


def row_tile(num_columns: int, *, interpreted: bool = INTERPRETED) -> Tile:
    """Returns the tile for whole rows: one 16-byte load of each component a thread where a row is not longer than that."""
    block = min(triton.next_power_of_2(num_columns), _MAX_BLOCK)
    if interpreted:
        return Tile(min(_INTERPRETED_VALUES // block, _INTERPRETED_ROWS), block, _WARPS)
    values = _WARPS * _THREADS_PER_WARP * _VALUES_PER_LOAD
    return Tile(min(max(values // block, 1), _MAX_ROWS), block, _WARPS)


def long_run_tile(num_columns: int, *, interpreted: bool = INTERPRETED) -> Tile:
    """Returns the tile for rows with long runs: one chain of additions, so one warp a program, and loads ahead of them."""
    block = min(triton.next_power_of_2(num_columns), _MAX_BLOCK if interpreted else _LONG_BLOCK)
    if interpreted:
        return Tile(1, block, 1)
    return Tile(min(_LONG_BLOCK // block, _MAX_ROWS), block, 1, unroll=_LONG_UNROLL)
