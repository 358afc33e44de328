"""`python -m shardam_testing.interpreted_snapshots`: snapshots on interpreted GPU kernels give the rows of their cuts."""

from __future__ import annotations

import numpy as np

from shardam_server.devices import INTERPRET
from shardam_server.shard.gpu_records import open_gpu
from shardam_testing.snapshot_model import Interleaving

NUM_EVENTS = 120
"""Some snapshots of a few pages each: every kernel that is interpreted takes milliseconds."""

if __name__ == "__main__":
    world, rng = Interleaving(open_gpu(INTERPRET, 1)), np.random.default_rng(3)
    kinds = [kind for kind in world.kinds if kind != "grow"]
    for number in range(NUM_EVENTS):
        world.run(str(rng.choice(kinds)), number)
    world.finish()
    assert world.num_kept_half_way > 0
