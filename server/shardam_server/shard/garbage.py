"""How often a shard looks for cyclic garbage.

A push of thousands of tables makes tens of thousands of objects that live until its end. Python's own setting looks through
them at every 700 new ones, and now and then through all tables' objects: a third of the time of such a push, and nothing is
found. Objects that no cycle holds are freed at once whatever is set here.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 5_000
"""New objects after which the young ones are looked through. With ten times as many a push of 5,000 tables is no quicker."""


def look_seldom() -> None:
    """Has this process look for garbage less often, and never among what it has now: modules, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
