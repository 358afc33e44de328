"""Bytes of data messages to arrays and back; every length is checked before anything is used."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardam_kernels import native
from shardam_proto.errors import BadOption, WrongShape
from shardam_proto.v1 import common_pb2
from shardam_server.shard.chunks import Buffer
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.records import Float32s, Int64s
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table

Number = TypeVar("Number", np.int64, np.float32)

ID_BYTES = 8
FLOAT_BYTES = 4
ROW_STEP_BYTES = 4


def _aligned(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Returns an array that kernels may read; one at an odd place is copied: its sender does not pad its messages."""
    return array if array.flags.aligned else array.copy()


def decode_ids(data: Buffer) -> Int64s:
    """Reads little-endian int64 ids.

    Raises:
        WrongShape: the length is no multiple of 8 bytes.
    """
    if len(data) % ID_BYTES:
        raise WrongShape(f"row_ids has {len(data)} bytes, which is no multiple of {ID_BYTES}")
    return _aligned(np.frombuffer(data, dtype="<i8")).astype(np.int64, copy=False)


def decode_rows(data: Buffer, num_rows: int, dim: int, what: str) -> Float32s:
    """Reads little-endian float32 rows.

    Raises:
        WrongShape: the length is not that of [num_rows, dim].
    """
    if len(data) != num_rows * dim * FLOAT_BYTES:
        raise WrongShape(f"{what} has {len(data)} bytes; {num_rows} rows of dim {dim} have {num_rows * dim * FLOAT_BYTES}")
    return _aligned(np.frombuffer(data, dtype="<f4")).astype(np.float32, copy=False).reshape(num_rows, dim)


def decode_row_steps(data: Buffer, num_rows: int) -> npt.NDArray[np.uint32]:
    """Reads little-endian uint32 steps of rows.

    Raises:
        WrongShape: there is not one for each row.
    """
    if len(data) != num_rows * ROW_STEP_BYTES:
        raise WrongShape(f"row_steps has {len(data)} bytes; {num_rows} rows have {num_rows * ROW_STEP_BYTES}")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def encode(array: npt.NDArray[np.generic]) -> bytes:
    """Writes an array little-endian, row-major."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def find_tables(state: ShardState, sections: Sequence[common_pb2.Section]) -> list[Table]:
    """Returns the table of each section.

    Raises:
        UnknownTable: a section names no table of this shard.
        BadOption: a section's dtype is not served.
    """
    tables = []
    for section in sections:
        table = state.table(section.table_id)
        if section.dtype != common_pb2.DTYPE_FLOAT32:
            raise BadOption(
                f"table {table.spec.name!r}: rows travel as float32 in this version, the section has dtype {section.dtype}"
            )
        tables.append(table)
    return tables


def decode_sections(num_rows: Sequence[int], data: Buffer) -> list[Int64s]:
    """Splits a message's ids among its sections.

    Args:
        num_rows: of each section.
        data: the ids of all.

    Returns:
        int64 [N] of each section.

    Raises:
        WrongShape: the ids do not fit the sections.
    """
    row_ids = decode_ids(data)
    ends = list(itertools.accumulate(num_rows, initial=0))
    if ends[-1] != row_ids.size:
        raise WrongShape(f"the sections name {ends[-1]} rows, row_ids holds {row_ids.size}")
    return [row_ids[start:end] for start, end in itertools.pairwise(ends)]


def split_rows(tables: Sequence[Table], num_rows: Sequence[int], data: Buffer) -> list[Float32s]:
    """Splits a message's rows among its sections.

    Args:
        tables: the table of each section.
        num_rows: of each section.
        data: the rows of all.

    Returns:
        float32 [N, dim] of each section.

    Raises:
        WrongShape: the rows do not fit the sections.
    """
    dims = [table.spec.dim for table in tables]
    ends = list(itertools.accumulate(map(operator.mul, num_rows, dims), initial=0))
    expected = ends[-1] * FLOAT_BYTES
    if len(data) != expected:
        shapes = ", ".join(
            f"{table.spec.name!r} [{count}, {dim}]" for table, count, dim in zip(tables, num_rows, dims, strict=True)
        )
        raise WrongShape(f"rows has {len(data)} bytes; {expected} are needed for {shapes or 'no section'}")
    values = _aligned(np.frombuffer(data, dtype="<f4")).astype(np.float32, copy=False)
    return [values[start:end].reshape(-1, dim) for (start, end), dim in zip(itertools.pairwise(ends), dims, strict=True)]


def check_owned(identity: ShardIdentity, table: Table, row_ids: Int64s) -> None:
    """Refuses rows that belong to another shard; written here they would be lost to every reader.

    Raises:
        StaleState: STALE_ROUTE.
    """
    num_shards, index = identity.require_route_map().num_shards, identity.index
    if num_shards > 1 and row_ids.size:
        _, ends = native.split_by_shard(row_ids, num_shards)
        num_owned = np.diff(ends, prepend=0)[index] if index < num_shards else 0  # beyond: it leaves the cluster
        identity.check_owns(bool(num_owned != row_ids.size), table.spec.name)
