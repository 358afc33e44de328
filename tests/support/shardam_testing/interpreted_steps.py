"""`python -m shardam_testing.interpreted_steps`: steps of groups on interpreted GPU kernels leave the CPU's bits, or exit 1."""

from __future__ import annotations

import sys

import numpy as np

from shardam_server.devices import INTERPRET
from shardam_server.shard.gpu_records import open_gpu
from shardam_server.shard.records import Device
from shardam_server.shard.state import ShardState
from shardam_testing.group_changes import group_changes
from shardam_testing.shard_histories import DEVICE, all_bits, make_tables


def state_on(device: Device) -> ShardState:
    state = ShardState(device)
    state.install(make_tables(device))
    for change in group_changes(np.random.default_rng(11)):
        change(state)
    return state


if __name__ == "__main__":
    interpreted, native = state_on(open_gpu(INTERPRET, 1)), state_on(DEVICE)
    assert native.num_rows > 20
    sys.exit(all_bits(interpreted) != all_bits(native))
