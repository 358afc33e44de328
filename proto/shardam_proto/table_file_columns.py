"""The arrays of a table's file, read from its beginning to its end, in either format."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt
import safetensors

METADATA_NAME = "shardam_table"
"""Of the JSON in a file."""

MAX_METADATA_BYTES = 2**20
"""Of the JSON; a schema has about 1 KiB, so more is no table's."""


class Malformed(Exception):
    """A file is not of its format."""


class Column(Protocol):
    """An array in a file."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Reads rows start to stop; the calls of one opened file go from its beginning to its end."""
        ...


class _SafetensorsColumn:
    """An array in a safetensors file."""

    _DTYPES: Mapping[str, str] = {
        "I64": "<i8",
        "F32": "<f4",
        "U32": "<u4",
        "F64": "<f8",
        "F16": "<f2",
        "I32": "<i4",
        "U64": "<u8",
    }
    """Those that somebody may take for the right one; all others are bytes for the message."""

    def __init__(self, file: safetensors.safe_open, name: str) -> None:
        self._slice = file.get_slice(name)  # type: ignore[no-untyped-call]  # safetensors has no types here
        self.shape = tuple(self._slice.get_shape())
        self.dtype = np.dtype(self._DTYPES.get(self._slice.get_dtype(), "V1"))

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        array: npt.NDArray[np.generic] = self._slice[start:stop]
        return array


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[tuple[str | None, dict[str, Column]]]:
    """Yields a file's description, if it has one, and its arrays."""
    with safetensors.safe_open(path, framework="numpy") as file:
        text = (file.metadata() or {}).get(METADATA_NAME)
        yield text, {name: _SafetensorsColumn(file, name) for name in file.keys()}  # noqa: SIM118 - no mapping


class _NpzColumn:
    """An array in an npz file, read as a stream, compressed or not."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._at = 0
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, fortran, self.dtype = read(stream)
        except ValueError as error:
            raise Malformed(str(error)) from error
        if fortran and len(self.shape) > 1:
            raise Malformed("an array is stored by columns; write it with numpy.ascontiguousarray")

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        if start != self._at:
            raise AssertionError(f"rows from {start} were asked for, the stream is at {self._at}")
        shape = (stop - start, *self.shape[1:])
        size = int(np.prod(shape)) * self.dtype.itemsize
        data = self._stream.read(size)
        if len(data) != size:
            raise Malformed(f"an array ends after {len(data)} of {size} bytes of a block")
        self._at = stop
        return np.frombuffer(data, self.dtype).reshape(shape)


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[tuple[str | None, dict[str, Column]]]:
    """Yields a file's description, if it has one, and its arrays; no member is unpickled."""
    with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as streams:
        text = None
        columns: dict[str, Column] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            stream = streams.enter_context(archive.open(member))
            if name == METADATA_NAME:
                text = _text_member(stream, member.file_size)
            else:
                columns[name] = _NpzColumn(stream)
        yield text, columns


def _text_member(stream: IO[bytes], size_bytes: int) -> str:
    if size_bytes > MAX_METADATA_BYTES:
        raise Malformed(f"{METADATA_NAME} has {size_bytes} bytes, at most {MAX_METADATA_BYTES} are read")
    try:
        return str(np.lib.format.read_array(stream, allow_pickle=False))
    except ValueError as error:
        raise Malformed(str(error)) from error
