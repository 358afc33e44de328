"""One table as one file, safetensors or npz: what is in it, and reading it with everything checked.

Client and server share it. Arrays, N rows in the order of their ids: `ids` int64 [N], `weight`, `exp_avg` and `exp_avg_sq`
float32 [N, dim], and `row_steps` uint32 [N] where each row counts its own steps. Beside them JSON, in a safetensors file's
metadata under "shardam_table", in an npz file as the member of that name: schema, seed, step, last hyper-parameters, and the
format's version. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors
from google.protobuf import json_format

from shardam_proto.errors import (
    BadOption,
    CheckpointDamaged,
    IdOutOfRange,
    NonFiniteState,
    SchemaMismatch,
    VersionMismatch,
    WrongShape,
)
from shardam_proto.schema import TableSpec
from shardam_proto.table_file_columns import METADATA_NAME, Column, Malformed, open_npz, open_safetensors
from shardam_proto.v1 import common_pb2

FORMAT_VERSION = 1
"""Version of the format; a file of another one is refused."""

SUFFIXES = (".safetensors", ".npz")

BLOCK_BYTES = 8 * 2**20
"""Weights of a block that is read or written at once: large against the cost of a read, small against any memory."""

_MAX_IDS_IN_ERROR = 8


@dataclasses.dataclass(frozen=True)
class TableFileInfo:
    """What a file says of its table.

    Attributes:
        spec: the schema, with the name that the table had.
        table_step: its step t.
        table_seed: seed of the initial weights; rows that were never written are not in the file and start from it.
        last_options: hyper-parameters of the last push, or None.
        one_moment: False: the table was changed while it was read, so that rows may be of different moments.
    """

    spec: TableSpec
    table_step: int
    table_seed: int
    last_options: common_pb2.AdamOptions | None = None
    one_moment: bool = True

    def to_json(self) -> str:
        """Returns the JSON in a file."""
        return json.dumps(
            {
                "format": "shardam-table",
                "version": FORMAT_VERSION,
                "schema": json_format.MessageToDict(self.spec.to_proto(), preserving_proto_field_name=True),
                "table_step": self.table_step,
                "table_seed": str(self.table_seed),  # 63 bits are more than JSON's readers promise to keep
                "last_options": None
                if self.last_options is None
                else json_format.MessageToDict(self.last_options, preserving_proto_field_name=True),
                "one_moment": self.one_moment,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str, path: Path) -> TableFileInfo:
        """Reads the JSON of a file.

        Raises:
            VersionMismatch: it has another version.
            CheckpointDamaged: it is none of ours, or a value has another kind.
        """
        try:
            values = json.loads(text)
            if values["version"] != FORMAT_VERSION:
                raise VersionMismatch(
                    f"table file {path} has format version {values['version']!r}, this program reads version {FORMAT_VERSION}; "
                    "read it with the shardam version that wrote it",
                    metadata={"file": str(path)},
                )
            spec = json_format.ParseDict(values["schema"], common_pb2.TableSpec())
            options = values["last_options"]
            return cls(
                spec=TableSpec.from_proto(spec),
                table_step=_whole(values["table_step"]),
                table_seed=_whole(int(values["table_seed"])),
                last_options=None if options is None else json_format.ParseDict(options, common_pb2.AdamOptions()),
                one_moment=bool(values["one_moment"]),
            )
        except (ValueError, TypeError, KeyError, json_format.ParseError) as error:
            raise CheckpointDamaged(
                f"table file {path}: its description {METADATA_NAME!r} cannot be read ({type(error).__name__}: {error}); "
                "export the table again",
                metadata={"file": str(path)},
            ) from error


def _whole(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is no count")
    return value


@dataclasses.dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of a file.

    Attributes:
        row_ids: int64 [N].
        weight: float32 [N, dim].
        exp_avg: float32 [N, dim].
        exp_avg_sq: float32 [N, dim].
        row_steps: uint32 [N], if each row counts its own steps, else None.
    """

    row_ids: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float32]
    exp_avg: npt.NDArray[np.float32]
    exp_avg_sq: npt.NDArray[np.float32]
    row_steps: npt.NDArray[np.uint32] | None = None


def columns_of(spec: TableSpec) -> dict[str, np.dtype[np.generic]]:
    """Returns the arrays of a table's file, in their order, with their dtypes."""
    floats = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), np.dtype("<f4"))
    steps = {"row_steps": np.dtype("<u4")} if spec.step == "row" else {}
    return {"ids": np.dtype("<i8"), **floats, **steps}


def column_shape(name: str, num_rows: int, dim: int) -> tuple[int, ...]:
    """Returns an array's shape."""
    return (num_rows,) if name in ("ids", "row_steps") else (num_rows, dim)


def rows_per_block(dim: int) -> int:
    """Returns how many rows are read or written at once."""
    return max(1, BLOCK_BYTES // (4 * dim))


def checked_path(path: str | Path) -> Path:
    """Returns a path with one of the two suffixes.

    Raises:
        BadOption: it has another one.
    """
    found = Path(path)
    if found.suffix not in SUFFIXES:
        raise BadOption(
            f"a table file ends in {' or '.join(SUFFIXES)}, which says its format; got {str(path)!r}",
            metadata={"file": str(path)},
        )
    return found


class TableFile:
    """A table's file, opened: its description is read and its arrays have the right names, dtypes and shapes.

    Args:
        path: ends in .safetensors or .npz.

    Raises:
        BadOption: no such file, another suffix, or it is no table's file.
        VersionMismatch: another version of the format.
        CheckpointDamaged: it cannot be read.
        SchemaMismatch: an array is missing or has another dtype than the schema in the file says.
        WrongShape: an array's shape does not fit.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = checked_path(path)
        if not self.path.is_file():
            raise BadOption(f"there is no table file {self.path}", metadata={"file": str(self.path)})
        with self._readable(), self._columns() as (text, columns):
            if text is None:
                raise BadOption(
                    f"{self.path} has no {METADATA_NAME!r}, so it is no table that shardam exported; create the table and "
                    "write rows of your own with Table.assign",
                    metadata={"file": str(self.path)},
                )
            self.info = TableFileInfo.from_json(text, self.path)
            self.num_rows = self._check_columns(columns)

    @property
    def spec(self) -> TableSpec:
        """The table's schema."""
        return self.info.spec

    def blocks(self) -> Iterator[TableRows]:
        """Yields all rows in the file's order, a block at a time.

        Raises:
            CheckpointDamaged: the file cannot be read further.
        """
        step = rows_per_block(self.spec.dim)
        with self._readable(), self._columns() as (_, columns):
            for start in range(0, self.num_rows, step):
                stop = min(start + step, self.num_rows)
                arrays = {name: column.read(start, stop) for name, column in columns.items()}
                yield TableRows(
                    row_ids=arrays["ids"].astype(np.int64, copy=False),
                    weight=arrays["weight"].astype(np.float32, copy=False),
                    exp_avg=arrays["exp_avg"].astype(np.float32, copy=False),
                    exp_avg_sq=arrays["exp_avg_sq"].astype(np.float32, copy=False),
                    row_steps=arrays["row_steps"].astype(np.uint32, copy=False) if "row_steps" in arrays else None,
                )

    def check_rows(self) -> npt.NDArray[np.int64]:
        """Reads all rows and checks what must hold before any of them is written; takes 16 bytes of memory a row.

        Returns:
            The rows' ids, sorted.

        Raises:
            WrongShape: an id is there twice.
            IdOutOfRange: an id lies outside a bounded table.
            NonFiniteState: a weight or moment is not finite, or exp_avg_sq is negative.
            CheckpointDamaged: the file cannot be read.
        """
        seen: list[npt.NDArray[np.int64]] = []
        for rows in self.blocks():
            self._check_values(rows)
            seen.append(rows.row_ids)
        ids = np.sort(np.concatenate(seen)) if seen else np.empty(0, np.int64)
        twice = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if twice.size:
            raise WrongShape(
                f"table file {self.path} has ids {some_ids(twice)} more than once; each row is there once",
                metadata={"file": str(self.path), "row_ids": some_ids(twice)},
            )
        bound = self.spec.num_embeddings
        if bound is not None and ids.size and (ids[0] < 0 or ids[-1] >= bound):
            outside = ids[(ids < 0) | (ids >= bound)]
            raise IdOutOfRange(
                f"table file {self.path}: its table has num_embeddings={bound}, so ids are 0 to {bound - 1}; it has "
                f"{some_ids(outside)}",
                metadata={"file": str(self.path), "row_ids": some_ids(outside)},
            )
        return ids

    def _check_values(self, rows: TableRows) -> None:
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            values = getattr(rows, name)
            bad = ~np.isfinite(values).all(axis=1)
            rule = "finite"
            if name == "exp_avg_sq":
                bad |= (values < 0).any(axis=1)
                rule = "finite and not negative"
            if bad.any():
                listed = some_ids(rows.row_ids[bad])
                raise NonFiniteState(
                    f"table file {self.path}: {name} must be {rule}; it is not for ids {listed}",
                    metadata={"file": str(self.path), "row_ids": listed, "column": name},
                )

    def _check_columns(self, columns: Mapping[str, Column]) -> int:
        """Returns the number of rows."""
        wanted = columns_of(self.spec)
        if set(columns) != set(wanted):
            raise SchemaMismatch(
                f"table file {self.path} has arrays {sorted(columns)}; its schema (step={self.spec.step!r}) needs "
                f"{sorted(wanted)}",
                metadata={"file": str(self.path)},
            )
        num_rows = columns["ids"].shape[0] if columns["ids"].shape else 0
        for name, dtype in wanted.items():
            found = columns[name]
            if found.dtype != dtype:
                raise SchemaMismatch(
                    f"table file {self.path}: {name} must be {dtype.name}, it is {found.dtype.name}",
                    metadata={"file": str(self.path), "column": name},
                )
            shape = column_shape(name, num_rows, self.spec.dim)
            if found.shape != shape:
                raise WrongShape(
                    f"table file {self.path}: {name} must have shape {shape} (rows by its ids, dim={self.spec.dim} by its "
                    f"schema), it has shape {found.shape}",
                    metadata={"file": str(self.path), "column": name},
                )
        return num_rows

    def _columns(self) -> contextlib.AbstractContextManager[tuple[str | None, dict[str, Column]]]:
        return open_safetensors(self.path) if self.path.suffix == ".safetensors" else open_npz(self.path)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError, Malformed) as error:
            raise CheckpointDamaged(
                f"table file {self.path} cannot be read ({type(error).__name__}: {error}); it is damaged or incomplete: "
                "export the table again",
                metadata={"file": str(self.path)},
            ) from error


def some_ids(row_ids: npt.NDArray[np.int64]) -> str:
    """Returns the first ids for a message, e.g. "[3, 5, ...]"."""
    listed = ", ".join(str(int(row_id)) for row_id in row_ids[:_MAX_IDS_IN_ERROR])
    return f"[{listed}{', ...' if row_ids.size > _MAX_IDS_IN_ERROR else ''}]"
