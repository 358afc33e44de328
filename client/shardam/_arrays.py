"""What callers hand in, made into the arrays that leave for the shards: ids as int64, rows as float32, all else refused.

Knows torch tensors without importing torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from shardam._python_ids import HASH_REMEDY, read_ids
from shardam_proto.errors import BadOption, IdOutOfRange, WrongIdDtype, WrongShape

if TYPE_CHECKING:
    import torch

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Values = npt.ArrayLike
"""An array, a CPU tensor, or a list of numbers."""

INT64_MAX = 2**63 - 1
MAX_IDS_IN_ERROR = 8
"""Ids an error message lists at most."""

_WIDENED_IDS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"})
_WIDENED_ROWS = frozenset({"float32", "float16", "bfloat16"})


def some(row_ids: npt.NDArray[np.integer]) -> str:
    """Returns the first ids for a message, e.g. "[3, 5, ...]"."""
    listed = ", ".join(str(int(row_id)) for row_id in row_ids[:MAX_IDS_IN_ERROR])
    return f"[{listed}{', ...' if row_ids.size > MAX_IDS_IN_ERROR else ''}]"


def _as_tensor(values: Values) -> torch.Tensor | None:
    loaded = sys.modules.get("torch")  # a tensor exists only where torch is loaded
    return cast("torch.Tensor", values) if loaded is not None and isinstance(values, loaded.Tensor) else None


def dtype_name(values: Values) -> str:
    """Returns the dtype's name, e.g. "int64" or "bfloat16", for arrays and tensors alike."""
    tensor = _as_tensor(values)
    if tensor is not None:
        return str(tensor.dtype).removeprefix("torch.")
    return np.asarray(values).dtype.name


def _tensor_to_numpy(tensor: torch.Tensor, what: str) -> npt.NDArray[np.generic]:
    if str(tensor.layout) != "torch.strided":
        raise BadOption(
            f"{what} is a sparse tensor ({tensor.layout}); hand in its parts: row_ids = grad._indices()[0], "
            "gradients = grad._values() (duplicates are summed)"
        )
    if tensor.device.type != "cpu":
        raise BadOption(f"{what} is on {tensor.device}; Table calls take CPU tensors: {what}.cpu()")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()  # NumPy has no bfloat16; widening is exact
    return cast("npt.NDArray[np.generic]", tensor.resolve_neg().numpy())


def _listed(values: Values) -> bool:
    return isinstance(values, (list, tuple))


def as_row_ids(values: Values, what: str = "row_ids") -> Int64s:
    """Returns ids as C-contiguous int64 of the same shape.

    Args:
        values: integers of any width that fit int64; Python integers, in lists or as objects, too.
        what: name of the argument, for messages.

    Raises:
        WrongIdDtype: floats, bools, strings, times, other objects, or ids outside int64.
        WrongShape: a ragged list.
        BadOption: a sparse tensor, or one on another device.
    """
    tensor = _as_tensor(values)
    if tensor is not None and dtype_name(values) not in {*_WIDENED_IDS, "uint64"}:
        raise _wrong_id_dtype(what, dtype_name(values))
    array = read_ids(values, what) if tensor is None else _tensor_to_numpy(tensor, what)
    name = array.dtype.name
    if name == "uint64":
        remedy = f"{what}.view({'np' if tensor is None else 'torch'}.int64)"
        _require_int64_range(cast("npt.NDArray[np.uint64]", array), what, remedy)
    elif name not in _WIDENED_IDS and array.dtype.kind != "O":  # objects are left only where there are none
        raise _wrong_id_dtype(what, name)
    return np.ascontiguousarray(array, dtype=np.int64).reshape(array.shape)


def _require_int64_range(array: npt.NDArray[np.uint64], what: str, remedy: str) -> None:
    too_large = array[array > np.uint64(INT64_MAX)]
    if too_large.size:
        raise WrongIdDtype(
            f"{what} has uint64 ids above 2**63 - 1: {some(too_large)}. Ids are int64; map them to the same 64 bits with "
            f"{remedy} (2**64 - 1 becomes -1), everywhere in the same way",
            metadata={"row_ids": some(too_large)},
        )


def _wrong_id_dtype(what: str, name: str) -> WrongIdDtype:
    if name.lower().startswith(("str", "bytes")):
        remedy = HASH_REMEDY
    elif name == "bool":
        remedy = "a mask is no list of ids; use mask.nonzero()"
    elif name.startswith(("datetime64", "timedelta64")):
        in_seconds = f"{name.partition('[')[0]}[s]"
        remedy = f"map times to int64 yourself, always in one unit, e.g. np.asarray(times, '{in_seconds}').astype(np.int64)"
    elif name.startswith(("float", "bfloat", "longdouble")):
        remedy = "a float loses digits of large ids; keep ids as int64 from the start"
    else:
        remedy = "keep ids as int64 from the start"
    return WrongIdDtype(f"{what} must be integers that fit int64, got {name}; {remedy}", metadata={"dtype": name})


def as_flat_row_ids(values: Values, what: str = "row_ids") -> Int64s:
    """Returns ids as int64 [N].

    Raises:
        WrongShape: more or fewer than one dimension.
        WrongIdDtype: as as_row_ids.
    """
    row_ids = as_row_ids(values, what)
    if row_ids.ndim != 1:
        raise WrongShape(f"{what} must have shape [N], got shape {row_ids.shape}; flatten it with .reshape(-1)")
    return row_ids


def as_rows(values: Values, what: str) -> Float32s:
    """Returns rows as C-contiguous float32 of the same shape; 16-bit floats are widened.

    Raises:
        BadOption: another dtype (float64 would be rounded, integers and complex numbers are no gradients), a sparse tensor,
            or one on another device.
        WrongShape: a ragged list.
    """
    tensor = _as_tensor(values)
    if tensor is None and _listed(values):
        return _rows_from_list(values, what)
    name = dtype_name(values)
    if name not in _WIDENED_ROWS:
        raise BadOption(
            f"{what} must be float32, float16 or bfloat16, got {name}; convert it yourself, e.g. with .astype(np.float32) or "
            ".float(), so that rounding is your choice",
            metadata={"dtype": name},
        )
    array = _tensor_to_numpy(tensor, what) if tensor is not None else np.asarray(values)
    return np.ascontiguousarray(array, dtype=np.float32).reshape(array.shape)


def _rows_from_list(values: Values, what: str) -> Float32s:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise WrongShape(f"{what} is a ragged list ({error}); every row needs the same number of values") from error
    if array.dtype.kind not in "fiu":
        raise BadOption(f"{what} must be numbers, got a list of {array.dtype.name}", metadata={"dtype": array.dtype.name})
    return np.ascontiguousarray(array, dtype=np.float32)


def check_rows_shape(row_ids: Int64s, rows: Float32s, dim: int, what: str) -> Float32s:
    """Returns rows as [N, dim], where N is the number of ids.

    No ids go with [0], what an empty list is, and with [0, 0], too: an optimizer without rows has no dim to show.

    Raises:
        WrongShape: the shapes do not fit; the message has both.
    """
    if rows.shape == (row_ids.size, dim):
        return rows
    if row_ids.size == 0 and rows.shape in ((0,), (0, 0)):
        return rows.reshape(0, dim)
    raise WrongShape(
        f"row_ids has shape {row_ids.shape} and {what} has shape {rows.shape}; {what} must have shape ({row_ids.size}, {dim})",
        metadata={"row_ids_shape": str(row_ids.shape), f"{what}_shape": str(rows.shape)},
    )


def check_flag(value: bool, what: str) -> bool:
    """Returns a bool; a string such as "no" would count as True.

    Raises:
        BadOption: it is no bool; the message starts with what.
    """
    if not isinstance(value, bool):
        raise BadOption(f"{what} must be True or False, got {value!r}")
    return value


def check_bounds(row_ids: Int64s, num_embeddings: int | None, table: str) -> None:
    """Refuses ids outside a bounded table.

    Raises:
        IdOutOfRange: at least one id is negative or too large.
    """
    if num_embeddings is None or row_ids.size == 0:
        return
    if row_ids.min() >= 0 and row_ids.max() < num_embeddings:
        return
    outside = row_ids[(row_ids < 0) | (row_ids >= num_embeddings)]
    raise IdOutOfRange(
        f"table {table!r} has num_embeddings={num_embeddings}, so ids are 0 to {num_embeddings - 1}; got {some(outside)}",
        metadata={"table": table, "row_ids": some(outside), "num_embeddings": str(num_embeddings)},
    )


def to_wire(array: npt.NDArray[np.generic]) -> bytes:
    """Writes an array little-endian, row-major."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
