"""Settings that a whole run of the tests is repeated with (scripts/run_matrix.py): no result may depend on them.

They come in names of their own, because tests start from an environment without SHARDAM_*.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

THREADS_NAME = "TEST_THREADS"
"""Threads of every shard's kernels, for SHARDAM_THREADS."""

CHUNK_NAME = "TEST_CHUNK_KIB"
"""KiB of rows in a message, for SHARDAM_CHUNK_KIB."""

_NAMES = {THREADS_NAME: "SHARDAM_THREADS", CHUNK_NAME: "SHARDAM_CHUNK_KIB"}


def matrix_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the settings of this run as processes read them; none in a plain run."""
    return {name: environment[own] for own, name in _NAMES.items() if own in environment}


def num_threads() -> int:
    """Returns the threads of kernels that run within a test's process."""
    return int(os.environ.get(THREADS_NAME, "1"))
