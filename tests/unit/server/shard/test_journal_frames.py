"""The frames of journal and base files: what goes in comes out, and nothing else does."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_server.shard.journal.file_operations import FileOperations
from shardam_server.shard.journal.frames import (
    BASE_MAGIC,
    HEADER_BYTES,
    JOURNAL_MAGIC,
    PREAMBLE_BYTES,
    FileDamaged,
    IncompleteFrame,
    encode_frame,
    encode_preamble,
)
from shardam_server.shard.journal.frames import FrameReader as Reader
from shardam_server.shard.journal.journal_file import JournalFile

Array = npt.NDArray[np.generic]


def write(path: Path, *frames: tuple[bytes, list[Array]]) -> None:
    operations = FileOperations()
    file = JournalFile(path, operations.create(path), 0, operations)
    file.write([encode_preamble(JOURNAL_MAGIC)])
    for sequence, (message, arrays) in enumerate(frames, start=5):
        file.write(encode_frame(sequence, message, arrays))
    file.close()


def read(path: Path) -> list[tuple[int, bytes, bytes]]:
    with Reader(path, JOURNAL_MAGIC) as reader:
        reader.read_preamble()
        frames: list[tuple[int, bytes, bytes]] = []
        while (frame := reader.next(5 + len(frames))) is not None:
            frames.append((frame.sequence, frame.message, bytes(frame.arrays)))
        assert reader.at_end
        return frames


@given(
    st.lists(
        st.tuples(st.binary(max_size=50), st.lists(st.integers(0, 3000), max_size=4)),
        max_size=5,
    )
)
def test_frames_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[bytes, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("frames") / "journal-000001"
    frames = [(message, [np.arange(size, dtype=np.int64) for size in sizes]) for message, sizes in parts]
    write(path, *((message, list[Array](arrays)) for message, arrays in frames))
    expected = [
        (sequence, message, b"".join(array.tobytes() for array in arrays))
        for sequence, (message, arrays) in enumerate(frames, start=5)
    ]
    assert read(path) == expected


def test_five_thousand_arrays_need_few_writes_and_large_ones_are_not_copied(tmp_path: Path) -> None:
    large = np.arange(100_000, dtype=np.float32)
    buffers = encode_frame(1, b"message", [large])
    assert any(np.shares_memory(np.frombuffer(buffer, np.uint8), large) for buffer in buffers)
    small = [np.full(40, number, np.float32) for number in range(5000)]
    assert len(encode_frame(1, b"message", [*small, large, *small])) == 4
    path = tmp_path / "journal-000001"
    many = [np.full(2000, number, np.float32) for number in range(3000)]  # more buffers than one write takes
    write(path, (b"m", list[Array](many)))
    assert read(path) == [(5, b"m", b"".join(array.tobytes() for array in many))]


def test_arrays_that_are_not_contiguous_are_written_by_value(tmp_path: Path) -> None:
    path = tmp_path / "journal-000001"
    array = np.arange(12, dtype=np.int64).reshape(3, 4)
    write(path, (b"", [array.T, array[:, :0], array[::2]]))
    assert read(path) == [(5, b"", array.T.tobytes() + array[::2].tobytes())]


def test_lengths_are_not_believed_beyond_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal-000001"
    write(path, (b"m", [np.zeros(1000, np.int64)]))
    path.write_bytes(path.read_bytes()[: PREAMBLE_BYTES + HEADER_BYTES + 3])
    with pytest.raises(IncompleteFrame, match="a record of 8001 bytes begins here, the file has 43 more"):
        read(path)


def test_a_base_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal-000001"
    path.write_bytes(encode_preamble(BASE_MAGIC))
    with pytest.raises(FileDamaged, match="it begins with"):
        read(path)


class StuckFiles(FileOperations):
    def write(self, descriptor: int, buffers: object, offset: int) -> int:
        return 0


def test_a_write_that_writes_nothing_fails(tmp_path: Path) -> None:
    path = tmp_path / "journal-000001"
    operations = StuckFiles()
    file = JournalFile(path, operations.create(path), 0, operations)
    with pytest.raises(OSError, match="wrote nothing") as error:
        file.write([b"x"])
    assert error.value.errno == errno.EIO
    file.close()
