"""Records on a GPU: the index stays on the host, records live in torch tensors, Triton kernels work on them in place.

The only module of the server that imports torch; a shard on the CPU never loads it. All work of a shard goes to one stream,
which orders it; a change waits for the stream once, at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardam_kernels import native
from shardam_kernels.factors import Factors
from shardam_kernels.gradients import Runs
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import STATE_DTYPE, WEIGHT, Layout
from shardam_kernels.row_steps import Rounding, RowSteps
from shardam_server.command_errors import CommandError
from shardam_server.devices import INTERPRET
from shardam_server.shard.records import AnyIndex, Float32s, Gradients, Int64s, StagedStep, Touches

if TYPE_CHECKING:
    from shardam_kernels import triton as kernels

OLDEST_CAPABILITY = (8, 0)
"""Compute capability that the kernels are compiled and checked for, and newer."""


def open_gpu(name: str, num_threads: int) -> GpuDevice:
    """Opens a GPU, or the interpreter of its kernels.

    Args:
        name: "cuda:N" or "interpret".
        num_threads: threads of the host's part of a request.

    Raises:
        CommandError: triton is missing, or the GPU cannot be used.
    """
    if name == INTERPRET:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
    try:
        from shardam_kernels import triton as module
    except ImportError as error:
        raise CommandError(f"--device {name} needs triton ({error}); install shardam[gpu], or use --device cpu") from error
    if name == INTERPRET:
        if not module.INTERPRETED:
            raise CommandError("--device interpret: triton was loaded before it was asked to interpret; use a fresh process")
        return GpuDevice(name, torch.device("cpu"), num_threads, module)
    device = torch.device(name)
    try:
        capability = torch.cuda.get_device_capability(device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {name} cannot be used: {error}; use --device cpu, or auto") from error
    if capability < OLDEST_CAPABILITY:
        raise CommandError(
            f"--device {name}: compute capability {capability[0]}.{capability[1]} is older than "
            f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]}; use --device cpu"
        )
    return GpuDevice(name, device, num_threads, module)


class GpuDevice:
    """One GPU as a shard uses it; several shards may share one.

    Args:
        name: as --device takes it.
        device: torch's device.
        num_threads: threads of the host's part of a request.
        module: shardam_kernels.triton.
    """

    def __init__(self, name: str, device: torch.device, num_threads: int, module: ModuleType) -> None:
        self.name = name
        self.device = device
        self.num_threads = num_threads
        self.kernels = module
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._one_at_a_time = threading.RLock()

    @property
    def memory_bytes(self) -> int:
        """Memory of the GPU that this process holds."""
        return int(torch.cuda.memory_reserved(self.device)) if self._stream is not None else 0

    def make_records(self, layout: Layout, initial: InitialRows) -> GpuRecords:
        """Makes an empty record store."""
        return GpuRecords(self, layout, initial)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Puts what is launched inside on the shard's stream; torch's current stream is per thread."""
        if self._stream is None:
            with self._one_at_a_time:  # Triton's interpreter keeps its state in globals
                yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def fetch(self, tensor: torch.Tensor) -> Float32s:
        """Returns a float32 tensor as an array on the host, through pinned memory; call it inside work()."""
        if self._stream is None:
            return np.asarray(tensor.numpy())
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return np.asarray(pinned.numpy())

    def finish(self) -> None:
        """Waits for the stream."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclasses.dataclass
class GroupedGradients:
    """A step's gradients as pushed, and the runs of each row.

    Attributes:
        gradients: float32 [N, dim].
        runs: positions of each row's gradients.
        slots: int64 [U], after find: -1 for a row that has none.
    """

    gradients: Float32s
    runs: Runs
    slots: Int64s = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def row_ids(self) -> Int64s:
        """int64 [U], distinct."""
        return self.runs.row_ids

    @property
    def bad_rows(self) -> Int64s:
        """Positions in row_ids that must be refused."""
        return self.runs.bad_rows

    @property
    def num_absent(self) -> int:
        """Rows that have no slot, after find."""
        return int(np.count_nonzero(self.slots < 0))

    def find(self, index: AnyIndex) -> int:
        """Looks the rows up; returns how many are absent."""
        self.slots = np.empty(self.row_ids.size, np.int64)
        return self.row_ids.size - index.lookup(self.row_ids, self.slots)

    def insert(self, index: AnyIndex) -> Int64s:
        """Gives slots to the absent rows; returns their positions.

        Raises:
            MemoryError: there is no room and none was reserved; nothing has changed.
        """
        absent = np.flatnonzero(self.slots < 0)
        slots = np.empty(absent.size, np.int64)
        index.insert(self.row_ids[absent], slots, np.empty(absent.size, np.uint8))
        self.slots[absent] = slots
        return absent


@dataclasses.dataclass(frozen=True)
class _GpuStep:
    on_device: kernels.DeviceStep
    factors: Factors
    slots: Int64s
    table_step: int


class GpuRecords:
    """Records in device memory.

    Args:
        device: the GPU.
        layout: where a record's components lie.
        initial: what rows are before their first push.
    """

    def __init__(self, device: GpuDevice, layout: Layout, initial: InitialRows) -> None:
        self._device = device
        self._layout = layout
        self._initial = initial
        self._kernels = device.kernels
        self._arena = self._kernels.Arena(layout.stride_bytes, device.device)
        self._records = self._kernels.Records(self._arena, layout)
        # An arena without slots: gathering from it computes initial weights.
        self._no_rows = native.Records(native.Arena(layout.stride_bytes), layout)
        with device.work():
            self._saturated = torch.zeros(1, dtype=torch.int64, device=device.device)

    @property
    def layout(self) -> Layout:
        """Where a record's components lie."""
        return self._layout

    def prepare(self, row_ids: Int64s, gradients: Float32s, factors: Factors) -> GroupedGradients:
        """Groups gradients by row on the host; the device sums them."""
        return GroupedGradients(gradients, native.group_gradients(row_ids, gradients, factors, self._device.num_threads))

    def reserve(self, num_slots: int) -> None:
        """Makes room for slots 0 to num_slots - 1.

        Raises:
            MemoryError: the device has none; nothing has changed.
        """
        with self._device.work():
            self._arena.reserve(num_slots)

    def initialize(self, slots: Int64s, row_ids: Int64s) -> None:
        """Writes new rows; the host makes their weights.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        with self._device.work():
            self._saturated += self._kernels.initialize(self._records, slots, self._initial_weights(row_ids))

    def _initial_weights(self, row_ids: Int64s) -> Float32s:
        weights = np.empty((row_ids.size, self.layout.dim), np.float32)
        absent = np.full(row_ids.size, -1, np.int64)
        native.gather_weights(self._no_rows, absent, row_ids, self._initial, weights, self._device.num_threads)
        return weights

    def stage(self, gradients: Gradients, factors: Factors, table_step: int, row_steps: RowSteps | None) -> StagedStep:
        """Brings a step to the device.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        if not isinstance(gradients, GroupedGradients):
            raise TypeError(f"gradients were prepared for another device: {type(gradients).__name__}")
        runs, slots = gradients.runs, gradients.slots
        if row_steps is None:
            steps, seed = np.full(slots.size, table_step, np.int64), self._initial.table_seed
            rounding = Rounding(seed, runs.row_ids, steps) if self.layout.dtype != STATE_DTYPE else None
            row_steps = RowSteps(factors.step_factors(slots.size), rounding)
        with self._device.work():
            on_device = self._kernels.stage_step(self._records, slots, gradients.gradients, runs, row_steps)
        return _GpuStep(on_device, factors, slots, table_step)

    def apply(self, staged: StagedStep, touches: Touches, change_number: int) -> None:
        """Applies a staged step, and notes what it touched."""
        if not isinstance(staged, _GpuStep):
            raise TypeError(f"the step was staged on another device: {type(staged).__name__}")
        with self._device.work():
            self._saturated += self._kernels.adam_update(self._records, staged.on_device, staged.factors)
        touches[staged.slots] = change_number, staged.table_step

    def gather_into(self, index: AnyIndex, row_ids: Int64s, out: Float32s) -> None:
        """Writes the weights of rows to out, float32 [N, dim]; of one that the index does not have, its initial weight.

        Raises:
            MemoryError: the device has no room for them; out holds anything.
        """
        slots = np.empty(row_ids.size, np.int64)
        index.lookup(row_ids, slots)
        out[:] = self.gather(slots, row_ids)

    def gather(self, slots: Int64s, row_ids: Int64s) -> Float32s:
        """Returns weights, float32 [N, dim]; the initial weight where a slot is -1.

        Raises:
            MemoryError: the device has no room for the reply.
        """
        out = self._fetch(WEIGHT, slots)
        absent = np.flatnonzero(slots < 0)
        if absent.size:
            out[absent] = self._initial_weights(row_ids[absent])
        return out

    def read(self, component: str, slots: Int64s) -> Float32s:
        """Returns one component, float32 [N, dim]; zeros where a slot is -1."""
        return self._fetch(component, slots)

    def _fetch(self, component: str, slots: Int64s) -> Float32s:
        with self._device.work():
            on_device = self._kernels.read_component(self._records, component, slots)
            return self._device.fetch(on_device)

    def write(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        """Writes components of distinct slots.

        Raises:
            MemoryError: the device has no room; nothing has changed.
        """
        with self._device.work():
            self._saturated += self._kernels.write_components(
                self._records, slots, {name: np.ascontiguousarray(values) for name, values in components.items()}
            )

    def fill(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        """Writes all components of distinct slots, and zeros between them.

        Raises:
            MemoryError: the device has no room; the slots hold anything.
        """
        rest = {name: values for name, values in components.items() if name != WEIGHT}
        with self._device.work():
            self._saturated += self._kernels.initialize(self._records, slots, np.ascontiguousarray(components[WEIGHT]))
        self.write(slots, rest)

    @property
    def saturated_values(self) -> int:
        """Values that lay beyond the weights' dtype so far and were saturated."""
        with self._device.work():
            return int(self._saturated.item())
