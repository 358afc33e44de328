"""Hashes that stored state, routing and every kernel depend on bit for bit (CONTRACT.md, Hashes). Pure NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
"""G: 2**64 divided by the golden ratio, splitmix64's increment."""

INITIAL_STEP = 0
"""The step t under which initial weights are hashed; optimizer steps count from 1."""

_MASK = 2**64 - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INVERSES = tuple(pow(multiplier, -1, 2**64) for multiplier in _MULTIPLIERS)


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer, a bijection of 64 bits.

    Args:
        values: uint64, any shape.

    Source:
        Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", variant 13 constants.
    """
    mixed = values ^ (values >> np.uint64(30))
    mixed = mixed * np.uint64(_MULTIPLIERS[0])
    mixed ^= mixed >> np.uint64(27)
    mixed = mixed * np.uint64(_MULTIPLIERS[1])
    mixed ^= mixed >> np.uint64(31)
    return mixed


def unmix64(mixed: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Undoes mix64, so that an index need not keep the id beside its hash.

    Args:
        mixed: uint64, any shape.
    """
    values = _unshift(mixed, 31)
    values = _unshift(values * np.uint64(_INVERSES[1]), 27)
    return _unshift(values * np.uint64(_INVERSES[0]), 30)


def _unshift(mixed: npt.NDArray[np.uint64], shift: int) -> npt.NDArray[np.uint64]:
    """Solves mixed = x ^ (x >> shift) for x; two terms suffice because 3 * shift >= 64."""
    solved = mixed ^ (mixed >> np.uint64(shift))
    solved ^= mixed >> np.uint64(2 * shift)
    return solved


def mix64_int(value: int) -> int:
    """mix64 of one Python integer, taken modulo 2**64."""
    return int(mix64(np.array([value & _MASK], np.uint64))[0])


def table_seed(cluster_seed: int, name: str) -> int:
    """Returns the seed of a table's initial weights and roundings, 0 to 2**64 - 1.

    Args:
        cluster_seed: the cluster's `--seed`, taken modulo 2**64.
        name: the table's name at creation; a rename keeps the seed.
    """
    import xxhash  # kernels need no names, and run where it is not installed (benchmarks/gpu.py)

    return mix64_int(cluster_seed + GOLDEN * xxhash.xxh3_64_intdigest(name.encode()))


def row_keys(table_seed: int, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Returns the key from which a row's hashes are made.

    Args:
        table_seed: 0 to 2**64 - 1.
        row_ids: int64 [N], C-contiguous.
    """
    return mix64(np.uint64(table_seed) + np.uint64(GOLDEN) * mix64(row_ids.view(np.uint64)))


def step_streams(row_keys: npt.NDArray[np.uint64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Returns what one step's hashes of a row are made from, uint64 [N].

    Args:
        row_keys: uint64 [N], of `row_keys`.
        steps: int64 [N], the step of each row.
    """
    return row_keys ^ mix64(steps.astype(np.uint64))


def stream_hashes(streams: npt.NDArray[np.uint64], dim: int) -> npt.NDArray[np.uint32]:
    """Returns the hash of every element of rows, uint32 [N, dim].

    Args:
        streams: uint64 [N], of `step_streams`.
        dim: number of columns.
    """
    columns = np.arange(1, dim + 1, dtype=np.uint64)
    mixed = mix64(streams[:, np.newaxis] + np.uint64(GOLDEN) * columns)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def element_hashes(row_keys: npt.NDArray[np.uint64], t: int, dim: int) -> npt.NDArray[np.uint32]:
    """Returns hash(id, t, column) of every element of the rows, uint32 [N, dim].

    Args:
        row_keys: uint64 [N], of `row_keys`.
        t: the step of all rows, or INITIAL_STEP.
        dim: number of columns.
    """
    return stream_hashes(row_keys ^ np.uint64(mix64_int(t)), dim)
