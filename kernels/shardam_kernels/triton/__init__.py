"""The kernels on a GPU, in Triton: records in torch tensors, read and updated in place, with native's bits.

Needs torch and triton (the extra `gpu`); nothing else of shardam_kernels imports them, and nothing here imports native code, so
that these kernels run as a plain script wherever torch and triton do. With TRITON_INTERPRET=1 in the environment before the
first import they run on CPU tensors in Triton's interpreter, for tests.

    Arena(stride_bytes, device)             reserve, num_slots, memory_bytes, distances(slots), view_record(slot)
    Records(arena, layout)                  as in native
    initialize(records, slots, weights)     new rows; the host makes their weights            -> saturated [1]
    stage_step(records, slots, gradients, runs, steps)   a push in one pinned transfer        -> DeviceStep
    adam_update(records, step, factors)     sum of each run, unscale, divide, one step        -> saturated [1]
    gather_weights(records, slots)          float32 [N, dim], zeros where a slot is -1        -> on the device
    read_component(records, name, slots)    the same for any component                        -> on the device
    write_components(records, slots, components)    to nearest even                           -> saturated [1]
    write_component(records, name, slots, values)   the same for one                          -> saturated [1]
    read_rows(records, component, distances, out)   gather without a transfer or an allocation

Slots, gradients, weights and values are NumPy arrays on the host; what is returned lies on the device and is not yet there
when a call returns: calls are put on the current stream and none waits. `saturated` may be added up on the device and read
whenever the host waits anyway. A push is: native.group_gradients (any thread), bad_rows empty, reserve, initialize what is
new, stage_step, adam_update.
"""

from __future__ import annotations

from shardam_kernels.triton.arena import Arena, Records
from shardam_kernels.triton.launch import (
    DeviceStep,
    adam_update,
    gather_weights,
    initialize,
    read_component,
    read_rows,
    stage_step,
    write_component,
    write_components,
)
from shardam_kernels.triton.tiles import INTERPRETED, LONG_RUN

__all__ = [
    "Arena",
    "DeviceStep",
    "INTERPRETED",
    "LONG_RUN",
    "Records",
    "adam_update",
    "gather_weights",
    "initialize",
    "read_component",
    "read_rows",
    "stage_step",
    "write_component",
    "write_components",
]
