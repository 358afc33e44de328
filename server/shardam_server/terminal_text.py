"""Text for a terminal: tables with columns as wide as their widest cell, sizes, durations."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_TENTHS_BELOW_S = 10
"""Shorter times are told with their fractions: a checkpoint may take less than a second."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row, the cells of a column below each other; nothing for no rows.

    Args:
        rows: rows of equally many cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def bytes_words(count: float) -> str:
    """Returns a size in binary units."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def duration_words(seconds: float) -> str:
    """Returns a duration in whole units: 7s, 3m 20s, 2h 5m, 4d 1h."""
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"


def seconds_words(seconds: float) -> str:
    """Returns how long something took: 0.42s, then as duration_words."""
    return f"{seconds:.2g}s" if seconds < _TENTHS_BELOW_S else duration_words(seconds)
