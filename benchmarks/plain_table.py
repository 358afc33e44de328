"""A table in plain C (plain_table.c), compiled by the system's compiler when it is first needed."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("plain_table.c")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
"""A sqrt that need not set errno is one instruction of many elements, as in our kernels."""

LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles and loads it.

    Raises:
        RuntimeError: there is no C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the peers in plain C need a C compiler: install one, or name it in CC")
    with tempfile.TemporaryDirectory(prefix="shardam-plain-") as folder:
        path = Path(folder) / "plain_table.so"
        subprocess.run([compiler, *FLAGS, "-o", str(path), str(SOURCE), "-lm"], check=True)
        loaded = ctypes.CDLL(str(path))  # stays loaded when the file is gone
    int64, float32, pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    loaded.plain_new.restype, loaded.plain_new.argtypes = pointer, [int64, int64, float32]
    loaded.plain_gather.restype, loaded.plain_gather.argtypes = None, [pointer, pointer, int64, pointer]
    loaded.plain_update.restype = int64
    loaded.plain_update.argtypes = [pointer, pointer, pointer, int64, float32, float32, float32, float32]
    return loaded


class PlainTable:
    """Rows 0 to num_rows - 1. Calls release the GIL; one at a time."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self.dim = dim
        self._library = library()
        self._table = self._library.plain_new(num_rows, dim, 0.1)
        self._step = 0

    def gather(self, row_ids: npt.NDArray[np.int64], out: int) -> None:
        """Writes weights, float32 [N, dim], to an address."""
        self._library.plain_gather(self._table, row_ids.ctypes.data, row_ids.size, out)

    def update(self, row_ids: npt.NDArray[np.int64], gradients: npt.NDArray[np.float32]) -> int:
        """Sums duplicates and takes one step of Adam; returns how many ids are distinct."""
        self._step += 1
        step_size = LR * math.sqrt(1 - BETA2**self._step) / (1 - BETA1**self._step)
        return int(
            self._library.plain_update(
                self._table, row_ids.ctypes.data, gradients.ctypes.data, row_ids.size, BETA1, BETA2, EPS, step_size
            )
        )
