"""Which device holds a shard's rows: the rules of --device, without importing torch.

The CUDA driver is asked directly, so that a machine without one, and a shard on the CPU, load nothing for the question.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re

from shardam_server.command_errors import UsageError

INTERPRET = "interpret"
"""The GPU path under Triton's interpreter, on the CPU: for tests, never chosen by auto."""

_DRIVER_NAMES = ("libcuda.so.1", "libcuda.so")
_CUDA_SUCCESS = 0


@dataclasses.dataclass(frozen=True)
class VisibleGpus:
    """What the CUDA driver shows this process.

    Attributes:
        count: number of GPUs; CUDA_VISIBLE_DEVICES applies.
        why_none: the reason where there is none.
    """

    count: int
    why_none: str = ""


def visible_gpus() -> VisibleGpus:
    """Asks the CUDA driver."""
    driver = _load_driver()
    if driver is None:
        return VisibleGpus(0, "no CUDA driver is installed")
    code = driver.cuInit(0)
    if code != _CUDA_SUCCESS:
        return VisibleGpus(0, f"the CUDA driver does not start (cuInit gives {code})")
    count = ctypes.c_int(0)
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code != _CUDA_SUCCESS or count.value == 0:
        return VisibleGpus(0, "the CUDA driver shows no GPU")
    return VisibleGpus(count.value)


def _load_driver() -> ctypes.CDLL | None:
    for name in _DRIVER_NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def check_device_name(name: str) -> str:
    """Returns a value of --device if it is one.

    Raises:
        ValueError: it is none.
    """
    if name in ("auto", "cpu", INTERPRET) or re.fullmatch(r"cuda:\d{1,4}", name):
        return name
    if name == "cuda":
        raise ValueError("name the GPU, as in cuda:0; or use auto")
    raise ValueError("unknown device; use auto, cpu or cuda:N")


@dataclasses.dataclass(frozen=True)
class DeviceChoice:
    """The device of one shard, and why.

    Attributes:
        name: "cpu", "cuda:N" or "interpret".
        reason: for the log, what `auto` saw; empty if the device was named.
    """

    name: str
    reason: str = ""


def choose_device(wanted: str, index: int) -> DeviceChoice:
    """Returns the device of a shard. A GPU that was named is never replaced by the CPU.

    Args:
        wanted: value of --device.
        index: shard index; auto spreads shards over the GPUs by it.

    Raises:
        UsageError: the GPU named is not there.
    """
    if wanted in ("cpu", INTERPRET):
        return DeviceChoice(wanted)
    gpus = visible_gpus()
    if wanted == "auto":
        if gpus.count == 0:
            return DeviceChoice("cpu", f"device auto: the CPU, because {gpus.why_none}")
        return DeviceChoice(f"cuda:{index % gpus.count}", f"device auto: shards are spread over {gpus.count} GPUs")
    ordinal = int(wanted.partition(":")[2])
    if gpus.count == 0:
        raise UsageError(f"--device {wanted}: {gpus.why_none}; use --device cpu, or auto")
    if ordinal >= gpus.count:
        present = "only 1 GPU is" if gpus.count == 1 else f"only {gpus.count} GPUs are"
        raise UsageError(f"--device {wanted}: {present} present; use cuda:0 to cuda:{gpus.count - 1}, cpu, or auto")
    return DeviceChoice(wanted)
