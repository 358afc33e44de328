"""What one row stores, and where: the one function that lists a record's components (CONTRACT.md, Record).

Pure: knows neither arrays nor devices. Everything that touches a record asks here for its offsets.
"""

from __future__ import annotations

import dataclasses
import functools

WEIGHT = "weight"
"""Name of the component that holds the row's values; the others are optimizer states."""

STATE_DTYPE = "float32"
"""Optimizer states are float32 whatever the weights are."""

SPARSE_ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""SparseAdam's states, torch's names."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one value of each dtype."""

UNIT_BYTES = 16
"""Strides are multiples of this: kernels are given a record's distance from a base pointer in these units."""

_SMALL_DIM = 4  # below, padding each component to 16 bytes would cost more than the values
_SMALL_ALIGN_BYTES = 4  # a float32 must not straddle
_HALF_LINE_BYTES = 32
_LINE_BYTES = 64  # a record of several cache lines starts on one
_LINE_ALIGNED_FROM_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Component:
    """One array of `dim` values inside a record.

    Attributes:
        name: "weight", or the state's name in torch ("exp_avg", "exp_avg_sq").
        offset_bytes: distance from the record's start.
        dtype: of one value.
    """

    name: str
    offset_bytes: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """The record of a table.

    Attributes:
        dim: values per component.
        dtype: the weight's dtype.
        components: weight first, then the states.
        stride_bytes: distance from one record to the next, a multiple of 16.
    """

    dim: int
    dtype: str
    components: tuple[Component, ...]
    stride_bytes: int

    def component(self, name: str) -> Component:
        """Returns the component of this name.

        Raises:
            KeyError: the record has none; the message lists those it has.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(f"no component {name!r}; the record has {[component.name for component in self.components]}")


@functools.cache
def layout(dim: int, dtype: str = "float32", states: tuple[str, ...] = SPARSE_ADAM_STATES) -> Layout:
    """Returns the layout of a record.

    Args:
        dim: values per row, at least 1.
        dtype: the weight's dtype: float32, bfloat16 or float16.
        states: names of the optimizer's states, all float32.

    Raises:
        ValueError: dim is below 1 or the dtype is unknown.
    """
    if dim < 1:
        raise ValueError(f"dim must be at least 1, got {dim}")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {sorted(ITEM_BYTES)}, got {dtype!r}")
    align = _SMALL_ALIGN_BYTES if dim < _SMALL_DIM else UNIT_BYTES
    components: list[Component] = []
    end = 0
    for name, item_dtype in [(WEIGHT, dtype), *((state, STATE_DTYPE) for state in states)]:
        components.append(Component(name, end, item_dtype))
        end = _round_up(end + dim * ITEM_BYTES[item_dtype], align)
    return Layout(dim, dtype, tuple(components), _stride(dim, end))


def _stride(dim: int, size_bytes: int) -> int:
    if dim < _SMALL_DIM:
        return _round_up(size_bytes, UNIT_BYTES)
    return _round_up(size_bytes, _LINE_BYTES if size_bytes >= _LINE_ALIGNED_FROM_BYTES else _HALF_LINE_BYTES)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
