"""The kernels in NumPy, written to be read: what native code and GPU code are held against, bit for bit.

The same operations and names as shardam_kernels.native, without threads and without checks of their arguments.
"""

from __future__ import annotations

from shardam_kernels.reference.adam import adam_update
from shardam_kernels.reference.initial import gather_weights, initial_rows, initialize
from shardam_kernels.reference.merge import group_gradients, merge_gradients
from shardam_kernels.reference.records import Arena, Records, read_component, write_component
from shardam_kernels.reference.steps import StepRows, gather_rows, group_rows, update_rows

__all__ = [
    "Arena",
    "Records",
    "StepRows",
    "adam_update",
    "gather_rows",
    "gather_weights",
    "group_gradients",
    "group_rows",
    "initial_rows",
    "initialize",
    "merge_gradients",
    "read_component",
    "update_rows",
    "write_component",
]
