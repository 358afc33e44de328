"""Weights of every dtype inside a kernel (CONTRACT.md, Dtypes and Hashes); reference/weights.py is the same in NumPy.

Narrow weights are int16 in memory and rounded by their bits: hardware casts round otherwise, and the interpreter truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""What kernels are told of a dtype."""

LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_HALF_LIMIT_BITS = tl.constexpr(0x47800000)  # 2**16: from here on a float16 is infinite
_LEAST_HALF_EXPONENT = tl.constexpr(127 - 14)
_HALF = tl.constexpr(8388608.0)  # of a fraction, in units of 2**-24


@triton.jit
def clamp(values, limit):
    """Brings values into -limit .. limit."""
    return tl.maximum(tl.minimum(values, limit), -limit)


@triton.jit
def element_hashes(streams, columns):
    """Returns mix64(stream + G * (column + 1)), uint64; hash(id, t, column) is its upper half.

    Args:
        streams: int64, row_key ^ mix64(t) as bits.
        columns: int32.
    """
    mixed = streams.to(tl.uint64, bitcast=True) + (columns + 1).to(tl.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER_1
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIER_2
    return mixed ^ (mixed >> 31)


@triton.jit
def widen(stored, DTYPE: tl.constexpr):
    """Returns weights as float32, exactly."""
    if DTYPE == BFLOAT16:
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == FLOAT16:
        return stored.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return stored


@triton.jit
def split_half(bits):
    """Returns k, fraction * 2**24 and what the exponent adds to a float16's bits, where |value| = (k + fraction) * q."""
    magnitude = tl.minimum(bits & 0x7FFFFFFF, _HALF_LIMIT_BITS)
    exponent = tl.maximum(magnitude >> 23, _LEAST_HALF_EXPONENT)
    inverse_q = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude.to(tl.float32, bitcast=True) * inverse_q
    floor = scaled.to(tl.int32)
    fraction = (scaled - floor.to(tl.float32)) * 16777216.0
    return floor, fraction, (exponent - _LEAST_HALF_EXPONENT) << 10


@triton.jit
def round_stochastically(values, hashes, DTYPE: tl.constexpr):
    """Returns magnitudes, int32, of the narrow dtype's bits: up with the probability of the fraction."""
    bits = values.to(tl.int32, bitcast=True)
    if DTYPE == BFLOAT16:
        return ((bits & 0x7FFFFFFF) + ((hashes >> 32).to(tl.int32) & 0xFFFF)) >> 16
    else:
        floor, fraction, exponent = split_half(bits)
        up = fraction > (hashes >> 40).to(tl.int32).to(tl.float32)
        return exponent + floor + up.to(tl.int32)


@triton.jit
def round_to_nearest_even(values, DTYPE: tl.constexpr):
    """Returns magnitudes, int32, of the narrow dtype's bits."""
    bits = values.to(tl.int32, bitcast=True)
    if DTYPE == BFLOAT16:
        return ((bits & 0x7FFFFFFF) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        floor, fraction, exponent = split_half(bits)
        up = (fraction > _HALF) | ((fraction == _HALF) & ((floor & 1) != 0))
        return exponent + floor + up.to(tl.int32)


@triton.jit
def is_beyond(magnitudes, DTYPE: tl.constexpr):
    """Whether rounding left the dtype's finite range."""
    if DTYPE == BFLOAT16:
        return magnitudes >= 0x7F80
    else:
        return magnitudes >= 0x7C00


@triton.jit
def narrow_bits(magnitudes, values, DTYPE: tl.constexpr):
    """Returns what is stored, int16: saturated, with the sign of the value."""
    sign = (values.to(tl.int32, bitcast=True) >> 16) & 0x8000
    if DTYPE == BFLOAT16:
        return (tl.minimum(magnitudes, 0x7F7F) | sign).to(tl.int16)
    else:
        return (tl.minimum(magnitudes, 0x7BFF) | sign).to(tl.int16)
