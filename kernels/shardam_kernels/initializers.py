"""Initial weights as constants that a kernel can apply with an integer hash, one float32 multiply and one add.

Folding happens here, on the host in float64, so that no kernel needs libm (CONTRACT.md, Rows before their first push). Every
element is `a + b * x` with x an exact float32 made from the element's 32-bit hash; what a, b and x are depends on the kind.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import FLOAT32_MAX, OptionError

InitKind = Literal["constant", "uniform", "normal"]

UNIFORM_BITS = 24
"""A uniform weight is one of 2**24 equally spaced values: the integers that float32 holds exactly."""

_TAIL = 6.5  # beyond the largest pair, 6.34: nothing of mean +- _TAIL * std may overflow


@dataclasses.dataclass(frozen=True, eq=False)
class FoldedInit:
    """An initializer, folded.

    Attributes:
        kind: constant: x = 0. uniform: x = the hash's upper 24 bits as a signed integer, -2**23 to 2**23 - 1.
            normal: x = frac of the hash's interval; a and b are indexed by sign * 2048 + interval.
        a: float32 [1], for normal [4096].
        b: float32, as a.
    """

    kind: InitKind
    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class InitialRows:
    """What the rows of a table are before their first push.

    Attributes:
        folded: the initializer.
        table_seed: the table's seed, 0 to 2**64 - 1.
        padding_idx: the id whose row starts at zero, or None.
    """

    folded: FoldedInit
    table_seed: int
    padding_idx: int | None = None


@functools.cache
def normal_pairs() -> npt.NDArray[np.float64]:
    """Returns the checked-in pairs (a, b) of the standard normal, [2048, 2]; normal_pairs.py makes them."""
    file = importlib.resources.files("shardam_kernels") / "normal_pairs.npy"
    with file.open("rb") as stream:
        pairs: npt.NDArray[np.float32] = np.load(stream)
    return pairs.astype(np.float64)


def fold_constant(value: float) -> FoldedInit:
    """Folds one value for all elements.

    Raises:
        OptionError: the value is not a finite float32 number.
    """
    _require_float32("Constant", value=value)
    return FoldedInit("constant", _array32([value]), _array32([0.0]))


@functools.lru_cache(maxsize=256)
def fold_uniform(low: float, high: float) -> FoldedInit:
    """Folds equally likely values over [low, high); low for all elements if they are equal.

    Raises:
        OptionError: a bound is not a finite float32 number, or high is below low.
    """
    _require_float32("Uniform", low=low, high=high)
    if high < low:
        raise OptionError(f"Uniform: high must be >= low, got low={low!r}, high={high!r}")
    first, end = np.float32(low), np.float32(high)
    if first == end:
        return fold_constant(low)
    # Around the middle, so that no product overflows and symmetric bounds give exact multiples of b.
    middle = np.float32((float(first) + float(end)) / 2)
    if middle == end:
        middle = first
    spacing = _largest_spacing(first, middle, end)
    return FoldedInit("uniform", _array32([middle]), _array32([spacing]))


def _largest_spacing(first: np.float32, middle: np.float32, end: np.float32) -> np.float32:
    """Returns the largest b <= (end - first) / 2**24 with which no rounding leaves [first, end)."""
    half = np.float32(2 ** (UNIFORM_BITS - 1))

    def fits(bits: int) -> bool:
        spacing = np.uint32(bits).view(np.float32)
        with np.errstate(over="ignore"):  # an infinite end does not fit
            return bool(middle + spacing * (half - 1) < end and middle - spacing * half >= first)

    widest = np.float32((float(end) - float(first)) / 2**UNIFORM_BITS)
    low, high = 0, int(widest.view(np.uint32))  # float32s >= 0 are ordered as their bits are
    if fits(high):
        return widest
    while high - low > 1:
        center = (low + high) // 2
        low, high = (center, high) if fits(center) else (low, center)
    return np.uint32(low).view(np.float32)


@functools.lru_cache(maxsize=256)
def fold_normal(mean: float, std: float) -> FoldedInit:
    """Folds the normal distribution.

    Raises:
        OptionError: mean or std is not finite, std is negative, or the tails leave float32.
    """
    _require_float32("Normal", mean=mean, std=std)
    if std < 0:
        raise OptionError(f"Normal: std must be >= 0, got {std!r}")
    if abs(mean) + _TAIL * std > FLOAT32_MAX:
        raise OptionError(f"Normal: mean +- {_TAIL} std must stay within float32, got mean={mean!r}, std={std!r}")
    positive = std * normal_pairs()
    a = np.concatenate([mean + positive[:, 0], mean - positive[:, 0]])
    b = np.concatenate([positive[:, 1], -positive[:, 1]])
    return FoldedInit("normal", _array32(a), _array32(b))


def xavier_uniform_bound(num_embeddings: int, dim: int) -> float:
    """Returns the bound of torch.nn.init.xavier_uniform_ (gain 1) for a table: weights are uniform over [-bound, bound)."""
    return math.sqrt(6 / (num_embeddings + dim))


def xavier_normal_std(num_embeddings: int, dim: int) -> float:
    """Returns the standard deviation of torch.nn.init.xavier_normal_ (gain 1) for a table."""
    return math.sqrt(2 / (num_embeddings + dim))


def _require_float32(what: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= FLOAT32_MAX:
            raise OptionError(f"{what}: {name} must be a finite float32 number, got {value!r}")


def _array32(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    array = np.array(values, np.float64).astype(np.float32)
    array.flags.writeable = False  # folded values are cached and shared
    return array
