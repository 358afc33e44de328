"""`python -m shardam_testing.checkpoint_devices DEVICE ROOT OLD NEW`: loads checkpoint OLD on a device and saves it as NEW.

Then the state is trained a little, on the device and on the CPU: exit 1 unless both have the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.gpu_records import open_gpu
from shardam_server.shard.records import Device
from shardam_testing.checkpoint_files import CLUSTER, IDS, USERS, TableRows, make_plan, push_rows, restore, rows_of, save
from shardam_testing.shard_histories import DEVICE as CPU


def go_on(root: Path, name: str, device: Device) -> TableRows:
    """The rows after a few pushes to what a checkpoint brings back on a device."""
    manifest, folder = Catalogue(root, CLUSTER).read(name)
    states = restore(manifest, folder, make_plan(manifest, manifest.num_shards), device)
    for seed in (5, 6):
        push_rows(states, "words", IDS, seed)
        push_rows(states, "users", USERS, seed)
        push_rows(states, "items", IDS, seed)
    return rows_of(states)


def main(device_name: str, root: Path, old: str, new: str) -> int:
    """Returns the exit status."""
    device = open_gpu(device_name, 1)
    manifest, folder = Catalogue(root, CLUSTER).read(old)
    save(root, restore(manifest, folder, make_plan(manifest, manifest.num_shards), device), new)
    return int(go_on(root, old, device) != go_on(root, old, CPU))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
