"""Host arrays to the device in one transfer: one pinned block, one copy, and views of what arrived."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 16  # kernels load and store 16 bytes at a time


def to_device(arrays: Mapping[str, npt.NDArray[np.generic]], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the arrays as tensors on the device, each starting at a multiple of 16 bytes.

    The copy is ordered before what is then put on the current stream, and the host does not wait for it.

    Args:
        arrays: C-contiguous, by name.
        device: where to.

    Raises:
        MemoryError: the device has no room.
    """
    starts: dict[str, int] = {}
    end = 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host_bytes = host.numpy()
    for name, array in arrays.items():
        host_bytes[starts[name] : starts[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    try:
        block = host.to(device, non_blocking=True)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{device} has no room for {end:,} bytes of one request") from error
    return {
        name: block[starts[name] : starts[name] + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for name, array in arrays.items()
    }


def _torch_dtype(array: npt.NDArray[np.generic]) -> torch.dtype:
    return {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}[array.dtype.name]
