"""One line on a terminal that says how many rows have been read or written."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self


class RowProgress:
    """The line; a context manager that clears it at its end.

    Args:
        subject: what is being done.
        shown: False: nothing is shown.
    """

    def __init__(self, subject: str, *, shown: bool) -> None:
        self._subject = subject
        self._shown = shown
        self._width = 0

    def tell(self, done: int, total: int) -> None:
        """Writes the line over."""
        if not self._shown:
            return
        share = f" ({min(100 * done // total, 100)} %)" if total else ""
        line = f"{self._subject}: {done} of {total} rows{share}"
        sys.stderr.write(f"\r{line.ljust(self._width)}")
        sys.stderr.flush()
        self._width = len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()


def make_row_progress(subject: str) -> RowProgress:
    """Returns a line that is shown if stderr is a terminal."""
    return RowProgress(subject, shown=sys.stderr.isatty())
