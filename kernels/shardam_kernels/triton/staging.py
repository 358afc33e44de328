"""Host arrays to the device in one transfer: one pinned block, one copy, and views of what arrived."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 16  # kernels load and store 16 bytes at a time
_TORCH_DTYPES = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}


@dataclasses.dataclass(frozen=True)
class Taken:
    """Rows of an array in another order, put in order while they are copied.

    Attributes:
        values: [N, dim].
        order: int32 [M], positions of rows.
    """

    values: npt.NDArray[np.float32]
    order: npt.NDArray[np.int32]


def to_device(arrays: Mapping[str, npt.NDArray[np.generic] | Taken], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the arrays as tensors on the device, each starting at a multiple of 16 bytes.

    The copy is ordered before what is then put on the current stream, and the host does not wait for it.

    Args:
        arrays: float32, int32 or int64, by name.
        device: where to.

    Raises:
        MemoryError: the device has no room.
    """
    places: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
    end = 0
    for name, array in arrays.items():
        values = array.values if isinstance(array, Taken) else array
        shape = (array.order.size, *values.shape[1:]) if isinstance(array, Taken) else values.shape
        size = int(np.prod(shape)) * values.itemsize
        places[name] = end, end + size, shape, _TORCH_DTYPES[values.dtype.name]
        end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        _copy(array, host.numpy()[slice(*places[name][:2])])
    try:
        block = host.to(device, non_blocking=True)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{device} has no room for {end:,} bytes of one request") from error
    return {name: block[first:last].view(dtype).view(shape) for name, (first, last, shape, dtype) in places.items()}


def _copy(array: npt.NDArray[np.generic] | Taken, target: npt.NDArray[np.uint8]) -> None:
    if isinstance(array, Taken):
        out = target.view(np.float32).reshape(array.order.size, *array.values.shape[1:])
        np.take(array.values, array.order, axis=0, out=out, mode="clip")  # in range; "raise" would copy once more
    else:
        target.view(array.dtype).reshape(array.shape)[...] = array
