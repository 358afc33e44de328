"""How often a shard looks for garbage, in a process of its own: what is frozen stays so."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from shardam_server.shard.garbage import look_seldom

loaded = [[] for _ in range(1_000)]
look_seldom()
print(gc.get_freeze_count() >= 1_000, gc.get_count()[0] < 1_000)

found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
kept = [[] for _ in range(4_000)]  # as a push of many tables
print(len(found))

class Cycle:
    def __init__(self):
        self.self = self

for _ in range(50_000):
    Cycle()
print(len(found) > 0, len([each for each in gc.get_objects() if type(each) is Cycle]) < 20_000)
"""


def test_a_push_of_many_tables_is_not_looked_through_and_garbage_is_found_all_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "True", "0", "True", "True"]
