"""A safetensors file as bytes, written and read without knowing what its tensors are for, and without torch.

The format: eight bytes of length (little-endian), so many bytes of JSON that give each tensor's dtype, shape and place, then
the tensors' bytes. It holds no code.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

from shardam_proto.errors import CheckpointDamaged

LENGTH_BYTES = 8
"""Bytes of the header's length; tensors begin at a multiple of it."""

MAX_HEADER_BYTES = 100 * 10**6
"""Readers of the format refuse a longer header."""

METADATA = "__metadata__"
"""Name in the header that is no tensor's."""

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Dtypes of the format, and the bytes of one value."""


@dataclasses.dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes.

    Attributes:
        dtype: one of ITEM_BYTES.
        shape: its shape.
        data: its values in C order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def num_bytes(self) -> int:
        """Bytes that dtype and shape ask for."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def write_tensors(tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the file of some tensors.

    Raises:
        ValueError: names and metadata are longer than a header may be.
    """
    names = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name].dtype])  # so that each lies at a multiple of its item
    header: dict[str, object] = {METADATA: dict(metadata)}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"{len(text)} bytes of names and plain values; at most {MAX_HEADER_BYTES} have room")
    return b"".join([len(text).to_bytes(LENGTH_BYTES, "little"), text, *(tensors[name].data for name in names)])


def read_tensors(data: bytes, what: str) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """Returns the tensors of a file, as views of it, and its metadata.

    Args:
        data: the file.
        what: names it in a message.

    Raises:
        CheckpointDamaged: it is no such file.
    """
    try:
        return _read(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"{what} is no safetensors file ({error!r}); take another checkpoint") from error


def _read(data: bytes) -> tuple[dict[str, RawTensor], dict[str, str]]:
    begin = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) < LENGTH_BYTES or begin > len(data):
        raise ValueError(f"it has {len(data)} bytes")
    header = json.loads(data[LENGTH_BYTES:begin])
    metadata = {str(name): str(value) for name, value in header.pop(METADATA, {}).items()}
    body = memoryview(data)[begin:]
    tensors = {}
    for name, entry in header.items():
        start, end = (int(place) for place in entry["data_offsets"])
        tensor = RawTensor(entry["dtype"], tuple(int(size) for size in entry["shape"]), body[start:end])
        if not 0 <= start <= end <= len(body) or end - start != tensor.num_bytes:
            raise ValueError(f"{name!r} lies at {start} to {end} of {len(body)}")
        tensors[name] = tensor
    return tensors, metadata
