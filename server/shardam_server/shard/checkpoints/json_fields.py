"""Reads JSON that is not trusted: each field by name, type and range, and no field that nobody asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from shardam_proto.errors import CheckpointDamaged, VersionMismatch


def parse_object(text: str | bytes, path: Path) -> Mapping[str, object]:
    """Returns the JSON object that a text is.

    Raises:
        CheckpointDamaged: it is none.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"it holds a JSON {type(value).__name__}, not an object")
    return value


def damaged(path: Path, problem: str) -> CheckpointDamaged:
    """Returns the error of a file of a checkpoint that is not as it was written."""
    return CheckpointDamaged(
        f"{path} is damaged: {problem}; restore another checkpoint, or put the file back from a copy",
        metadata={"file": str(path)},
    )


class Fields:
    """One JSON object.

    Args:
        value: what should be the object.
        where: what it is, for messages.
        path: the file that it stands in.

    Attributes:
        path: the file that it stands in.

    Raises:
        CheckpointDamaged: it is no object.
    """

    def __init__(self, value: object, where: str, path: Path) -> None:
        self._where = where
        self.path = path
        if not isinstance(value, dict):
            raise self.damaged(f"it is a JSON {type(value).__name__}, not an object")
        self._values: dict[str, object] = value
        self._taken: set[str] = set()

    def damaged(self, problem: str) -> CheckpointDamaged:
        """Returns an error that says where the problem is."""
        return damaged(self.path, f"{self._where}: {problem}")

    def names(self) -> list[str]:
        """Returns the fields' names, for an object whose names are values themselves."""
        return list(self._values)

    def take(self, name: str) -> object:
        """Returns a field as it is.

        Raises:
            CheckpointDamaged: it is missing.
        """
        if name not in self._values:
            raise self.damaged(f"{name} is missing")
        self._taken.add(name)
        return self._values[name]

    def text(self, name: str, max_length: int) -> str:
        """Returns a text.

        Raises:
            CheckpointDamaged: it is missing, no text, or too long.
        """
        value = self.take(name)
        if not isinstance(value, str) or len(value) > max_length:
            raise self.damaged(f"{name} is not a text of at most {max_length} characters")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """Returns an integer from low to high.

        Raises:
            CheckpointDamaged: it is missing, no integer, or outside.
        """
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.damaged(f"{name} is not an integer from {low} to {high}")
        return value

    def seconds(self, name: str) -> float:
        """Returns a finite number >= 0.

        Raises:
            CheckpointDamaged: it is missing, no number, infinite or negative.
        """
        value = self.take(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.damaged(f"{name} is not a number of seconds")
        try:
            return float(value)
        except OverflowError as error:
            raise self.damaged(f"{name} is not a number of seconds") from error

    def object(self, name: str) -> Mapping[str, object]:
        """Returns an object.

        Raises:
            CheckpointDamaged: it is missing, or none.
        """
        value = self.take(name)
        if not isinstance(value, dict):
            raise self.damaged(f"{name} is not an object")
        return value

    def objects(self, name: str) -> list[Fields]:
        """Returns a list of objects.

        Raises:
            CheckpointDamaged: it is missing, no list, or one of it is no object.
        """
        value = self.take(name)
        if not isinstance(value, list):
            raise self.damaged(f"{name} is not a list")
        return [Fields(one, f"{name}[{place}]", self.path) for place, one in enumerate(value)]

    def finish(self) -> None:
        """Checks that every field was asked for: one that is not known may change what the others mean.

        Raises:
            VersionMismatch: there is one more.
        """
        unknown = sorted(self._values.keys() - self._taken)
        if unknown:
            raise VersionMismatch(
                f"{self.path}: {self._where} has {', '.join(map(repr, unknown[:8]))}, which this shardam does not know; use "
                "the shardam that wrote it",
                metadata={"file": str(self.path)},
            )


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")
