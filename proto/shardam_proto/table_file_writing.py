"""Writes a table's file: rows come in any order and number, and lie in the file in the order of their ids."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from shardam_proto.errors import BadOption, WrongShape
from shardam_proto.schema import TableSpec
from shardam_proto.table_file_columns import METADATA_NAME
from shardam_proto.table_files import (
    TableFileInfo,
    TableRows,
    checked_path,
    column_shape,
    columns_of,
    rows_per_block,
    some_ids,
)

_SAFETENSORS_DTYPES = {"<i8": "I64", "<f4": "F32", "<u4": "U32"}

_HEADER_ALIGNMENT = 8
"""safetensors' data begin at a multiple of it, so that they can be mapped as they are."""


class TableFileWriter:
    """Writes one file; a context manager, which leaves nothing behind unless finish was called.

    Ids and row steps stay in memory, about 28 bytes a row with the order that is made of them; weights and moments wait in
    unnamed files in the folder of the path, which therefore needs room for twice the file.

    Args:
        path: ends in .safetensors or .npz; a file that is there is replaced at the end, in one moment.
        spec: the table's schema.

    Raises:
        BadOption: another suffix, or the folder does not exist or cannot be written.
    """

    def __init__(self, path: str | Path, spec: TableSpec) -> None:
        self._path = checked_path(path)
        self._spec = spec
        self._ids: list[npt.NDArray[np.int64]] = []
        self._row_steps: list[npt.NDArray[np.uint32]] = []
        self._waiting: dict[str, IO[bytes]] = {}
        self._files = contextlib.ExitStack()
        try:
            for name in ("weight", "exp_avg", "exp_avg_sq"):
                file = tempfile.TemporaryFile(dir=self._path.parent)  # noqa: SIM115 - the stack closes it
                self._waiting[name] = self._files.enter_context(file)
        except OSError as error:
            self._files.close()
            raise BadOption(
                f"table {spec.name!r} cannot be exported to {self._path}: the folder {self._path.parent} cannot be written "
                f"({error.strerror}); make it, or name another one",
                metadata={"file": str(self._path)},
            ) from error

    def add(self, rows: TableRows) -> None:
        """Takes rows, each id once over all calls.

        Raises:
            BadOption: the disk is full.
        """
        with self._disk_errors():
            for name, file in self._waiting.items():
                values = np.ascontiguousarray(getattr(rows, name), dtype="<f4")
                file.write(values.reshape(-1).view(np.uint8).data)
        self._ids.append(np.array(rows.row_ids, dtype=np.int64))
        if self._spec.step == "row":
            if rows.row_steps is None:
                raise WrongShape(
                    f"rows of table {self._spec.name!r} have no row_steps, and each of its rows counts its own steps"
                )
            self._row_steps.append(np.array(rows.row_steps, dtype=np.uint32))

    def finish(self, info: TableFileInfo) -> int:
        """Writes the file, durably, and puts it in its place.

        Args:
            info: what the file says of its table.

        Returns:
            The rows in it.

        Raises:
            WrongShape: a row was added twice.
            BadOption: the disk is full.
        """
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        twice = ids[1:][ids[1:] == ids[:-1]]
        if twice.size:
            raise WrongShape(f"table {self._spec.name!r}: rows {some_ids(twice)} were added to {self._path} twice")
        part = self._path.with_name(f".{self._path.name}.part-{os.getpid()}")
        try:
            with self._disk_errors(), part.open("wb") as file:
                write = self._write_safetensors if self._path.suffix == ".safetensors" else self._write_npz
                write(file, info, ids, order)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)
            _sync_folder(self._path.parent)
        finally:
            part.unlink(missing_ok=True)
            self._files.close()
        return int(ids.size)

    def _write_safetensors(
        self, file: IO[bytes], info: TableFileInfo, ids: npt.NDArray[np.int64], order: npt.NDArray[np.intp]
    ) -> None:
        header: dict[str, object] = {"__metadata__": {METADATA_NAME: info.to_json()}}
        end = 0
        for name, dtype in columns_of(self._spec).items():
            shape = column_shape(name, ids.size, self._spec.dim)
            start, end = end, end + int(np.prod(shape)) * dtype.itemsize
            header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype.str], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        file.write(len(text).to_bytes(8, "little") + text)
        for name in columns_of(self._spec):
            for block in self._column(name, ids, order):
                file.write(block)

    def _write_npz(self, file: IO[bytes], info: TableFileInfo, ids: npt.NDArray[np.int64], order: npt.NDArray[np.intp]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            # a ZipInfo of its own has no time of day: the same rows make the same bytes
            with archive.open(zipfile.ZipInfo(f"{METADATA_NAME}.npy"), "w") as member:
                np.lib.format.write_array(member, np.array(info.to_json()), allow_pickle=False)
            for name, dtype in columns_of(self._spec).items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    shape = column_shape(name, ids.size, self._spec.dim)
                    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(member, described)
                    for block in self._column(name, ids, order):
                        member.write(block)

    def _column(self, name: str, ids: npt.NDArray[np.int64], order: npt.NDArray[np.intp]) -> Iterator[memoryview]:
        """Yields an array's bytes, in the order of the ids."""
        if ids.size == 0:
            return
        if name == "ids":
            yield _bytes(ids.astype("<i8"))
        elif name == "row_steps":
            yield _bytes(np.concatenate(self._row_steps)[order].astype("<u4"))
        else:
            self._waiting[name].flush()
            values = np.memmap(self._waiting[name], "<f4", "r", shape=(ids.size, self._spec.dim))
            step = rows_per_block(self._spec.dim)
            for start in range(0, ids.size, step):
                yield _bytes(values[order[start : start + step]])

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise BadOption(
                f"table {self._spec.name!r}: the disk of {self._path.parent} is full; an export needs room for twice its file; "
                f"nothing is left of {self._path}",
                metadata={"file": str(self._path)},
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()


def _bytes(array: npt.NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
