"""What a trainer adds to a checkpoint: nested containers of tensors, arrays and plain values, as one safetensors file.

Tensors and arrays are the file's tensors; how they hang together, and plain values, is JSON in its metadata. Reading it runs no
code: there is no pickle.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardam._tensor_file import RawTensor, read_tensors, write_tensors
from shardam_proto.errors import BadOption, CheckpointDamaged, VersionMismatch

if TYPE_CHECKING:
    import torch

FORMAT = "shardam-extra"
VERSION = "1"
"""Of the structure in the metadata."""

PLAIN_INT = 2**53
"""Integers below this magnitude are JSON numbers; readers other than Python's take larger ones for floats."""

_FORMAT_OF_NUMPY = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
    "<c8": "C64",
}
"""NumPy's dtype -> the format's; any other one is stored as bytes."""

_NUMPY_KINDS = "biufcSUmM"
"""Kinds of NumPy dtypes whose values are their bytes: no objects, no records."""

_FORMAT_OF_TORCH = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""torch's dtype -> the format's; any other one is stored as bytes."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def encode_extra(extra: object) -> bytes:
    """Returns a file that holds a value.

    Args:
        extra: None, bool, int, float, str, bytes, NumPy arrays and scalars, torch tensors; and dicts with any scalar keys,
            lists and tuples of them. Ordered and default dicts come back as plain ones, tensors on the CPU and without a graph.

    Raises:
        TypeError: a value of another type; the message has the path to it.
        BadOption: a container contains itself, they are nested too deep, or plain values are too many: put them into an array.
    """
    encoder = _Encoder()
    try:
        structure = json.dumps(encoder.encode(extra, "extra"), separators=(",", ":"))
    except RecursionError as error:
        raise BadOption("extra has containers within containers too deep; make it flatter") from error
    metadata = {"format": FORMAT, "version": VERSION, "structure": structure}
    try:
        return write_tensors(encoder.tensors, metadata)
    except ValueError as error:
        raise BadOption(f"extra has too many plain values ({error}): put lists of numbers into NumPy arrays") from error


def decode_extra(data: bytes, what: str) -> object:
    """Returns the value that a file holds; its arrays are private and writable.

    Args:
        data: the file.
        what: names it in a message.

    Raises:
        CheckpointDamaged: it is no such file.
        VersionMismatch: it was written by a newer version.
    """
    tensors, metadata = read_tensors(data, what)
    if metadata.get("format") != FORMAT:
        raise CheckpointDamaged(f"{what} is no addition to a checkpoint: its format is {metadata.get('format')!r}")
    if metadata.get("version") != VERSION:
        raise VersionMismatch(
            f"{what} has version {metadata.get('version')!r} of its format, this package reads version {VERSION!r}; use the "
            "version of shardam that wrote it"
        )
    try:
        return _Decoder(tensors).decode(json.loads(metadata["structure"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, struct.error) as error:
        raise CheckpointDamaged(f"{what} cannot be read ({error!r}); take another checkpoint") from error


class _Encoder:
    """Turns a value into JSON, and takes its tensors out."""

    def __init__(self) -> None:
        self.tensors: dict[str, RawTensor] = {}
        self._open: set[int] = set()

    def encode(self, value: object, path: str) -> Json:
        if value is None or type(value) in (bool, str):
            return value  # type: ignore[return-value]
        if type(value) is int:
            return value if abs(value) < PLAIN_INT else {"int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}  # a NaN has a payload
        if type(value) is bytes:
            return {"bytes": self._put(path, RawTensor("U8", (len(value),), value))}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value, path)
        if type(value) in (list, tuple, dict, OrderedDict, defaultdict):
            return self._container(value, path)
        torch_module = sys.modules.get("torch")
        if torch_module is not None and isinstance(value, torch_module.Tensor):
            return self._tensor(value, path)
        raise TypeError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint takes None, bool, int, float, str, "
            "bytes, NumPy arrays, torch tensors, and dicts, lists and tuples of them: pass an object's state_dict(), or plain "
            "values"
        )

    def _container(self, value: object, path: str) -> Json:
        if id(value) in self._open:
            raise BadOption(f"{path} contains itself; a checkpoint takes trees of values")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return {
                    "dict": [[_encode_key(key, path), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()]
                }
            if isinstance(value, (list, tuple)):
                items: list[Json] = [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
                return items if isinstance(value, list) else {"tuple": items}
            raise AssertionError(f"{path} is no container")
        finally:
            self._open.discard(id(value))

    def _array(self, value: npt.NDArray[np.generic] | np.generic, path: str) -> Json:
        array = np.asarray(value)
        if array.dtype.kind not in _NUMPY_KINDS or array.dtype.fields is not None:
            raise TypeError(
                f"{path} is a NumPy array of dtype {array.dtype}, which is no plain number or text; convert it first"
            )
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            raise TypeError(
                f"{path} is a {type(value).__qualname__}, a kind of array whose extras would be lost; pass np.asarray of it"
            )
        data, shape = np.ascontiguousarray(array).tobytes(), array.shape
        known = _FORMAT_OF_NUMPY.get(array.dtype.str)
        tensor = RawTensor("U8", (len(data),), data) if known is None else RawTensor(known, shape, data)
        described: dict[str, Json] = {"array": self._put(path, tensor), "dtype": array.dtype.str, "shape": list(shape)}
        return {**described, "scalar": True} if isinstance(value, np.generic) else described

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        import torch

        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            raise TypeError(
                f"{path} is a {type(value).__qualname__} of layout {value.layout}, dtype {value.dtype}; a checkpoint takes "
                "plain dense tensors: convert it first"
            )
        if value.is_meta:
            raise TypeError(f"{path} is a tensor on the meta device, which has no values")
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        known = _FORMAT_OF_TORCH.get(dtype)
        tensor = RawTensor("U8", (len(data),), data) if known is None else RawTensor(known, shape, data)
        return {"tensor": self._put(path, tensor), "dtype": dtype, "shape": list(shape)}

    def _put(self, path: str, tensor: RawTensor) -> str:
        name = path
        while name in self.tensors:  # two keys may look the same: NaN is not NaN
            name += "'"
        self.tensors[name] = tensor
        return name


def _encode_key(key: object, path: str) -> Json:
    """Returns a dict's key; bytes stay in the JSON here, and a tuple's items are keys."""
    if type(key) is bytes:
        return {"base64": base64.b64encode(key).decode()}
    if type(key) is tuple:
        return {"tuple": [_encode_key(item, path) for item in key]}
    if key is None or type(key) in (bool, str, int, float):
        return _Encoder().encode(key, path)
    raise TypeError(
        f"{path} has the key {key!r}, a {type(key).__qualname__}; keys are None, bool, int, float, str, bytes, or tuples "
        "of them"
    )


class _Decoder:
    """Turns JSON back into the value."""

    def __init__(self, tensors: dict[str, RawTensor]) -> None:
        self._tensors = tensors

    def decode(self, node: Json) -> object:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = next(iter(node), "nothing")
        decoders: dict[str, Callable[[dict[str, Json]], object]] = {
            "int": lambda node: int(str(node["int"]), 16),
            "float": lambda node: struct.unpack("<d", bytes.fromhex(str(node["float"])))[0],
            "base64": lambda node: base64.b64decode(str(node["base64"]), validate=True),
            "bytes": lambda node: bytes(self._tensors[str(node["bytes"])].data),
            "tuple": lambda node: tuple(self.decode(item) for item in _items(node["tuple"])),
            "dict": self._dict,
            "array": self._array,
            "tensor": self._tensor,
        }
        return decoders[kind](node)

    def _dict(self, node: dict[str, Json]) -> object:
        pairs = [_items(pair) for pair in _items(node["dict"])]
        return {self.decode(key): self.decode(value) for key, value in pairs}

    def _array(self, node: dict[str, Json]) -> object:
        dtype = np.dtype(str(node["dtype"]))
        if dtype.kind not in _NUMPY_KINDS:
            raise ValueError(f"dtype {dtype}")
        data = bytearray(self._tensors[str(node["array"])].data)  # a copy: private and writable
        shape = _shape(node)
        _check_size(data, shape, dtype.itemsize)
        array = np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
        return array[()] if node.get("scalar") else array

    def _tensor(self, node: dict[str, Json]) -> object:
        import torch

        name = str(node["dtype"])
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no dtype {name}")
        data = bytearray(self._tensors[str(node["tensor"])].data)
        shape = _shape(node)
        _check_size(data, shape, dtype.itemsize)
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _items(node: Json) -> list[Json]:
    if not isinstance(node, list):
        raise ValueError(f"a list was expected, got {node!r}")
    return node


def _shape(node: dict[str, Json]) -> tuple[int, ...]:
    return tuple(int(str(size)) for size in _items(node["shape"]))


def _check_size(data: bytearray, shape: tuple[int, ...], item_bytes: int) -> None:
    """Refuses a shape that its values do not fill, before room is made for it."""
    if min(shape, default=0) < 0 or math.prod(shape) * item_bytes != len(data):
        raise ValueError(f"{len(data)} bytes are not {shape} values of {item_bytes} bytes")
