"""What a shard does with freed memory, in processes of its own: mallopt holds for good."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import numpy as np
from shardam_server.shard.allocator import keep_freed_memory
print(keep_freed_memory(int(sys.argv[1])))
def faults():
    import resource
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(4 * 2**20, np.uint8)  # as the buffer of a push of 4 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""

PAGES = 4 * 2**20 // 4096 * 20
"""Page faults if every block is new."""


def run(keep_bytes: int) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(keep_bytes)], capture_output=True, text=True, check=True, timeout=60
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_blocks_of_a_few_mb_are_used_again() -> None:
    kept, faults = run(64 * 2**20)
    assert kept == "True"
    assert faults < PAGES / 100


def test_zero_leaves_the_allocator_as_it_is() -> None:
    assert run(0)[0] == "False"
