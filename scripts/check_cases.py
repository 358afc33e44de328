"""Checks the list of field cases against the tests that carry @pytest.mark.case; run by `make cases`.

Usage: python scripts/check_cases.py [--list tests/cases.toml] [--tests tests]

The list names every number once, with a title and one status:
    status = "tested"               a test carries the case's mark
    status = "later", topic = "..."     the part of shardam that brings it is not built yet
    status = "not here", why = "..."    it does not concern shardam
`deviation` says where shardam's answer differs from the case's, `open` which half of a tested case comes with a later part.

Exit status: 0 if list and tests agree, 1 with one line per gap otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMPANION = {"tested": None, "later": "topic", "not here": "why"}
"""Status -> the field that must stand beside it."""

OPTIONAL = {"deviation", "open"}
"""Fields that any case may have."""


class CaseMarks:
    """A pytest plugin that notes which tests carry which case."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = defaultdict(list)
        self.malformed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Reads the marks of all collected tests."""
        for item in items:
            for mark in item.iter_markers("case"):
                if len(mark.args) == 1 and isinstance(mark.args[0], str) and not mark.kwargs:
                    self.tests[mark.args[0]].append(item.nodeid)
                else:
                    self.malformed.append(f"{item.nodeid}: mark.case takes one string, such as 'C001'")


def collect(tests: Path) -> CaseMarks:
    """Collects the tests without running them.

    Raises:
        SystemExit: collection failed; pytest's output is printed.
    """
    marks = CaseMarks()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", str(tests)], plugins=[marks])
    if code != pytest.ExitCode.OK:
        print(output.getvalue())
        sys.exit(f"collecting {tests} failed (pytest exit {int(code)})")
    return marks


def expand(numbers: Sequence[str]) -> Iterator[str]:
    """Yields the numbers of ranges such as "C001-C007"."""
    for entry in numbers:
        first, _, last = entry.partition("-")
        for number in range(int(first[1:]), int((last or first)[1:]) + 1):
            yield f"C{number:03d}"


def gaps_of_entry(number: str, entry: Mapping[str, object], tests: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with one case."""
    status = entry.get("status")
    if not entry.get("title"):
        yield f"{number}: has no title"
    if not isinstance(status, str) or status not in COMPANION:
        yield f"{number}: status {status!r} is none of {', '.join(COMPANION)}"
        return
    companion = COMPANION[status]
    if companion is not None and not entry.get(companion):
        yield f"{number}: status {status!r} needs a {companion}"
    unknown = set(entry) - {"title", "status", companion} - OPTIONAL
    if unknown:
        yield f"{number}: unknown field {', '.join(sorted(map(str, unknown)))}"
    if status == "tested" and not tests:
        yield f"{number}: listed as tested, but no test carries @pytest.mark.case({number!r})"
    if status != "tested" and tests:
        yield f"{number}: listed as {status!r}, but {tests[0]} carries its mark"


def find_gaps(listing: Mapping[str, object], tests: Mapping[str, Sequence[str]]) -> list[str]:
    """Compares the list with the marks.

    Args:
        listing: `numbers` (ranges of all cases) and `case` (number -> entry).
        tests: number -> tests that carry its mark.
    """
    numbers, cases = listing["numbers"], listing["case"]
    assert isinstance(numbers, list)
    assert isinstance(cases, dict)
    known = list(expand(numbers))
    gaps = [f"{number}: missing from the list" for number in known if number not in cases]
    gaps += [f"{number}: listed, but outside `numbers`" for number in cases if number not in known]
    gaps += [f"{number}: marked by {tests[number][0]}, but not in the list" for number in tests if number not in cases]
    for number, entry in cases.items():
        gaps += gaps_of_entry(number, entry, tests.get(number, ()))
    return gaps


def main() -> int:
    """Prints the gaps, or a summary."""
    parser = argparse.ArgumentParser(description="Checks the list of field cases against the tests.")
    parser.add_argument("--list", type=Path, default=ROOT / "tests" / "cases.toml")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    arguments = parser.parse_args()
    listing = tomllib.loads(arguments.list.read_text(encoding="utf-8"))
    marks = collect(arguments.tests)
    gaps = marks.malformed + find_gaps(listing, marks.tests)
    for gap in gaps:
        print(gap)
    statuses = [entry.get("status") for entry in listing["case"].values()]
    print(f"cases: {len(statuses)} listed, " + ", ".join(f"{statuses.count(status)} {status}" for status in COMPANION), end="")
    print(f", {len(gaps)} gaps" if gaps else ", no gaps")
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
