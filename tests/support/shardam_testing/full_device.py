"""A CPU whose memory is full when a test says so."""

from __future__ import annotations

from collections.abc import Mapping

from shardam_kernels.factors import Factors
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import Layout
from shardam_kernels.row_steps import RowSteps
from shardam_server.shard.records import CpuRecords, Float32s, Gradients, Int64s, StagedStep


class FullDevice:
    """A device whose chosen operation finds no room from its n-th call on, for n calls."""

    name = "full"
    num_threads = 1
    memory_bytes = 0

    def __init__(self) -> None:
        self.fails_at = ""
        self.calls_left = 0
        self.fired = 0

    def make_records(self, layout: Layout, initial: InitialRows) -> FullRecords:
        return FullRecords(self, layout, initial)

    def finish(self) -> None:
        return None

    def meet(self, operation: str) -> None:
        if operation != self.fails_at:
            return
        self.calls_left -= 1
        if self.calls_left < 0:
            self.fired += 1
            raise MemoryError("full has no room")


class FullRecords(CpuRecords):
    """Records that ask their device for room."""

    def __init__(self, device: FullDevice, layout: Layout, initial: InitialRows) -> None:
        super().__init__(layout, initial, num_threads=1)
        self._device = device

    def reserve(self, num_slots: int) -> None:
        self._device.meet("reserve")
        super().reserve(num_slots)

    def initialize(self, slots: Int64s, row_ids: Int64s) -> None:
        self._device.meet("initialize")
        super().initialize(slots, row_ids)

    def stage(self, gradients: Gradients, factors: Factors, table_step: int, row_steps: RowSteps | None) -> StagedStep:
        self._device.meet("stage")
        return super().stage(gradients, factors, table_step, row_steps)

    def read(self, component: str, slots: Int64s) -> Float32s:
        self._device.meet("read")
        return super().read(component, slots)

    def write(self, slots: Int64s, components: Mapping[str, Float32s]) -> None:
        self._device.meet("write")
        super().write(slots, components)
