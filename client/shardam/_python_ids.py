"""Ids that are Python objects: lists of integers and object arrays, made int64 to the last digit; all else is refused by name.

Knows no torch; what a list of tensors holds is NumPy's to say.
"""

from __future__ import annotations

from collections.abc import Collection, Set

import numpy as np
import numpy.typing as npt

from shardam_proto.errors import WrongIdDtype, WrongShape

HASH_REMEDY = "hash strings to int64 yourself, with a stable hash such as xxh3_64 (never Python's hash(), it is salted)"

_MAX_BITS_SHOWN = 128
"""Integers of more bits, 39 digits, are shortened in messages; Python itself refuses to write more than 4300 digits."""

_INTEGERS = (int, np.integer)
_TEXTS = (str, bytes)
_BOOLS = (bool, np.bool_)


def read_ids(values: npt.ArrayLike, what: str) -> npt.NDArray[np.generic]:
    """Returns ids as an array: of int64 where they are Python integers, else of the dtype that NumPy sees.

    Args:
        values: an array, a list, or whatever else was handed in; no tensor.
        what: name of the argument, for messages.

    Raises:
        WrongShape: a ragged list.
        WrongIdDtype: no array at all, objects that are no integers, types that NumPy would blend into one, or an integer
            outside int64.
    """
    listed = isinstance(values, (list, tuple))
    array = _as_array(values, what)
    if listed and array.size == 0:
        return array.astype(np.int64)  # an empty list has no dtype of its own
    types = _types_in(values) if isinstance(values, (list, tuple)) else _types_of(array)
    if types and all(_is_a(kind, _INTEGERS) for kind in types):
        return array if array.dtype.kind == "i" else _exact(np.array(values, dtype=object), what)
    if array.dtype.kind == "O" and types:
        raise _refusal(what, types, "" if array.ndim == 0 else "a list of " if listed else "an object array of ")
    if len(types) > 1 and any(_is_a(kind, _TEXTS + _BOOLS) for kind in types):
        raise _refusal(what, types, "a list of ")
    return array


def _as_array(values: npt.ArrayLike, what: str) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise WrongShape(
            f"{what} is a ragged list ({error}); its lists need one length: flatten it, and hand shardam.EmbeddingBag the "
            "place where each list starts as offsets"
        ) from error
    except (TypeError, RuntimeError) as error:
        raise WrongIdDtype(
            f"{what} must be integers that fit int64, got {_article(type(values).__name__)} that NumPy cannot read ({error}); "
            "hand in one array, one tensor or a list of integers",
            metadata={"dtype": type(values).__name__},
        ) from error


def _types_in(values: Collection[object]) -> Set[type]:
    """Returns the types in a list and in the lists within it."""
    types = set(map(type, values))
    if types.isdisjoint((list, tuple)):
        return types
    inner = (_types_in(value) for value in values if isinstance(value, (list, tuple)))
    return (types - {list, tuple}).union(*inner)


def _types_of(array: npt.NDArray[np.generic]) -> Set[type]:
    """Returns the types of an object array's elements; none for another array, and for one without elements."""
    return set(map(type, array.ravel().tolist())) if array.dtype.kind == "O" else set()


def _is_a(kind: type, kinds: tuple[type, ...]) -> bool:
    return issubclass(kind, kinds) and (kind is not bool or bool in kinds)


def _exact(objects: npt.NDArray[np.object_], what: str) -> npt.NDArray[np.int64]:
    try:
        return objects.astype(np.int64)
    except OverflowError:
        limits = np.iinfo(np.int64)
        outside = next(value for value in map(int, objects.ravel()) if not limits.min <= value <= limits.max)
        raise _outside(outside, what) from None


def _outside(value: int, what: str) -> WrongIdDtype:
    if 0 < value < 2**64:
        remedy = (
            "map unsigned ids to the same 64 bits: subtract 2**64 from each one of 2**63 or more, everywhere in the same way"
        )
    else:
        remedy = "hash ids outside -2**63 to 2**63 - 1 to int64 yourself, with a stable hash such as xxh3_64"
    return WrongIdDtype(
        f"{what} must be integers that fit int64, got {_shown(value)}; {remedy}",
        metadata={"row_ids": f"[{_shown(value)}]"},
    )


def _shown(value: int) -> str:
    bits = value.bit_length()
    return str(value) if bits <= _MAX_BITS_SHOWN else f"{hex(value)[:12]}... (an integer of {bits} bits)"


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _refusal(what: str, types: Set[type], container: str) -> WrongIdDtype:
    """Returns the error for objects that are no integers.

    Args:
        what: name of the argument.
        types: of the elements, or of the one object that was handed in.
        container: what holds them, e.g. "a list of "; "" for one object.
    """
    names = " and ".join(sorted(kind.__name__ for kind in types))
    if container:
        got, remedy = container + names, _remedy_for_elements(types)
    else:
        (kind,) = types
        got, remedy = "None" if kind is type(None) else _article(names), _remedy_for_one(kind, what)
    return WrongIdDtype(f"{what} must be integers that fit int64, got {got}; {remedy}", metadata={"dtype": names})


def _remedy_for_elements(types: Set[type]) -> str:
    if all(issubclass(kind, _TEXTS) for kind in types):
        return HASH_REMEDY
    if any(issubclass(kind, _TEXTS) for kind in types):
        return f"hand in integers only; {HASH_REMEDY}"
    if any(issubclass(kind, _BOOLS) for kind in types):
        return "a bool is no id; hand in integers only, and mask.nonzero() for a mask"
    return "hand in integers only: leave missing ids out, and map what is no integer to int64 yourself"


def _remedy_for_one(kind: type, what: str) -> str:
    if kind is type(None):
        return "hand in an array, a tensor or a list of integers; [] names no row"
    if issubclass(kind, (set, frozenset)):
        return f"a set has no order of its own: hand in sorted({what})"
    if issubclass(kind, dict):
        return f"hand in list({what}) for its keys or list({what}.values()) for its values"
    if hasattr(kind, "__iter__"):
        return f"hand in list({what})"
    return "hand in an array, a tensor or a list of integers"
