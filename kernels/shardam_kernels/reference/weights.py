"""Weights of every dtype, as float32 and back (CONTRACT.md, Dtypes).

Weights below float32 are handled as their bits, uint16: NumPy has no bfloat16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Uint16s = npt.NDArray[np.uint16]
Uint32s = npt.NDArray[np.uint32]

_LARGEST_FLOAT32 = np.finfo(np.float32).max
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}
_HALF_LIMIT = np.float32(65536)  # from here on a float16 is infinite, however it is rounded
_LEAST_HALF_EXPONENT = 127 - 14  # biased; below, float16s are as far apart as in the binade of 2**-14


def widen(bits: Uint16s, dtype: str) -> Float32s:
    """Returns weights as float32, exactly.

    Args:
        bits: uint16, any shape.
        dtype: bfloat16 or float16.
    """
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def saturate_float32(values: Float32s) -> tuple[Float32s, int]:
    """Returns values with infinities brought back to the largest finite ones, and how many there were."""
    return np.clip(values, -_LARGEST_FLOAT32, _LARGEST_FLOAT32), int(np.isinf(values).sum())


def round_to_nearest_even(values: Float32s, dtype: str) -> tuple[Uint16s, int]:
    """Returns the bits of the nearest weights, uint16, and how many were saturated.

    Args:
        values: float32, any shape, no NaN.
        dtype: bfloat16 or float16.
    """
    bits = values.view(np.uint32)
    if dtype == "bfloat16":
        rounded = ((bits & _MAGNITUDE) + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        floor, fraction, exponent = _split_half(values)
        up = (fraction > 2**23) | ((fraction == 2**23) & (floor % 2 == 1))
        rounded = exponent + floor + up.astype(np.uint32)
    return _finish(rounded, bits, dtype)


def round_stochastically(values: Float32s, dtype: str, random: Uint32s) -> tuple[Uint16s, int]:
    """Returns the bits of weights rounded up in magnitude with the probability of their fraction, and how many were saturated.

    Args:
        values: float32, any shape, no NaN.
        dtype: bfloat16 or float16.
        random: uint32, as values.
    """
    bits = values.view(np.uint32)
    if dtype == "bfloat16":
        rounded = ((bits & _MAGNITUDE) + (random & np.uint32(0xFFFF))) >> np.uint32(16)
    else:
        floor, fraction, exponent = _split_half(values)
        up = fraction > (random >> np.uint32(8)).astype(np.float32)
        rounded = exponent + floor + up.astype(np.uint32)
    return _finish(rounded, bits, dtype)


def _split_half(values: Float32s) -> tuple[Uint32s, Float32s, Uint32s]:
    """Returns k, fraction * 2**24 and what the exponent adds to the bits, where |value| = (k + fraction) * q.

    q = 2**(max(e, -14) - 10) is the distance of float16s around the value; every step is exact.
    """
    magnitude = np.minimum(np.abs(values), _HALF_LIMIT)
    exponent = np.maximum(magnitude.view(np.uint32) >> np.uint32(23), np.uint32(_LEAST_HALF_EXPONENT))
    inverse_q = ((np.uint32(264) - exponent) << np.uint32(23)).view(np.float32)  # 2**(10 - e)
    scaled = magnitude * inverse_q
    floor = scaled.astype(np.uint32)  # below 2**11
    fraction = (scaled - floor.astype(np.float32)) * np.float32(2**24)
    return floor, fraction, (exponent - np.uint32(_LEAST_HALF_EXPONENT)) << np.uint32(10)


def _finish(rounded: Uint32s, bits: Uint32s, dtype: str) -> tuple[Uint16s, int]:
    """Saturates magnitudes and gives them their sign."""
    infinity = np.uint32(_INFINITY_BITS[dtype])
    signed = np.minimum(rounded, infinity - np.uint32(1)) | ((bits >> np.uint32(16)) & np.uint32(0x8000))
    return signed.astype(np.uint16), int((rounded >= infinity).sum())
