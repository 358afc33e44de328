"""Click data of the user's own, from one CSV or TSV file in a small documented format.

The format: UTF-8, a header line, comma-separated, or tab-separated if the header has a tab.

- `label`: 0 or 1, exactly one such column.
- `cat_*`: categorical fields, at least one; the column's name is its table's name. An int64 in decimal is its own row id;
  any other text, an empty cell included, is hashed (xxh3-64), the same on every machine.
- `dense_*`: numbers; an empty cell is 0. They are squeezed by log(1 + |x|) and scaled by the training part's mean and std.
- Other columns are refused, so that a misspelled one is not left out silently.

Samples are taken to be in order of time: the last tenth is the test set. The file is read into memory as a whole.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from shardam.demo.dataset import ClickData
from shardam.demo.features import last_tenth, row_id, scale_dense
from shardam_proto.errors import BadOption

FORMAT = "a header line with one column `label` (0 or 1), columns `cat_*` (at least one) and columns `dense_*` (numbers)"

MIN_SAMPLES = 20
"""Fewer leave a test tenth in which AUC means nothing."""


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Places of the columns in a line."""

    names: tuple[str, ...]
    label: int
    categorical: tuple[int, ...]
    dense: tuple[int, ...]

    @classmethod
    def of_header(cls, path: Path, header: list[str]) -> _Columns:
        """Sorts the columns by name, or raises BadOption with what the format wants."""
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise BadOption(f"{path}, line 1: column {twice[0]!r} stands twice; name each column once")
        unknown = [name for name in header if name != "label" and not name.startswith(("cat_", "dense_"))]
        if unknown:
            raise BadOption(f"{path}, line 1: unknown column {unknown[0]!r}; the file needs {FORMAT}")
        categorical = tuple(place for place, name in enumerate(header) if name.startswith("cat_"))
        if "label" not in header or not categorical:
            missing = "label" if "label" not in header else "cat_*"
            raise BadOption(f"{path}, line 1: no column {missing!r} in {header}; the file needs {FORMAT}")
        dense = tuple(place for place, name in enumerate(header) if name.startswith("dense_"))
        return cls(tuple(header), header.index("label"), categorical, dense)


def read_file(path: Path) -> ClickData:
    """Reads a file in the module's format.

    Raises:
        BadOption: the file cannot be read, or a line does not fit the format; names the line, the column and the value.
    """
    labels: list[float] = []
    row_ids: list[list[int]] = []
    dense: list[list[float]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _lines(path, file)
            _, header = next(lines, ("", []))
            columns = _Columns.of_header(path, header)
            for where, cells in lines:
                labels.append(_label(where, cells[columns.label]))
                row_ids.append([row_id(cells[place]) for place in columns.categorical])
                dense.append([_number(where, columns.names[place], cells[place]) for place in columns.dense])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadOption(f"--data {path} cannot be read: {error}; it takes movielens, synthetic or a CSV or TSV file") from error
    if len(labels) < MIN_SAMPLES:
        raise BadOption(f"{path} has {len(labels)} samples; at least {MIN_SAMPLES} are needed")
    is_test = last_tenth(len(labels))
    return ClickData(
        title=f"click data of {path.name}",
        notes=(),
        fields=tuple(columns.names[place] for place in columns.categorical),
        row_ids=np.array(row_ids, dtype=np.int64),
        dense=scale_dense(np.array(dense, dtype=np.float64).reshape(len(labels), len(columns.dense)), is_test),
        labels=np.array(labels, dtype=np.float32),
        is_test=is_test,
        shown_field=columns.names[columns.categorical[0]],
    )


def _lines(path: Path, file: TextIO) -> Iterator[tuple[str, list[str]]]:
    """Yields each line's place ("PATH, line N") and cells; skips blank lines, refuses lines of another width than the first."""
    delimiter = "\t" if "\t" in file.readline() else ","
    file.seek(0)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    width = None
    for cells in reader:
        if not cells:
            continue
        where = f"{path}, line {reader.line_num}"
        width = width or len(cells)
        if len(cells) != width:
            raise BadOption(f"{where}: {len(cells)} columns, but the header has {width}")
        yield where, cells


def _label(where: str, text: str) -> float:
    if text not in ("0", "1"):
        raise BadOption(f"{where}: label must be 0 or 1, got {text!r}")
    return float(text)


def _number(where: str, column: str, text: str) -> float:
    if text == "":
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadOption(f"{where}: {column} must be a finite number or empty, got {text!r}")
    return value
