"""Small checkpoints, one for each format that was ever released, with the values that must come back from them.

Usage: PYTHONPATH=tests/support python -m shardam_testing.checkpoint_samples

Makes the newest one below tests/durability/data. A sample is made once: what a later program reads must have been written by
the program of its time.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.manifest import FORMAT_VERSION
from shardam_server.shard.journal.frames import ARITHMETIC_VERSION
from shardam_server.shard.state import ShardState
from shardam_testing.checkpoint_files import CLUSTER, make_plan, push_rows, restore, save, trained
from shardam_testing.group_changes import BOUNDED, MEMBERS, members
from shardam_testing.journal_samples import SAMPLES, describe
from shardam_testing.state_changes import find, origin

NEWEST = f"checkpoint-{FORMAT_VERSION}-arithmetic-{ARITHMETIC_VERSION}"
"""Name of the sample that this program makes: the root folder of checkpoints."""

NAME = "sample"


def sample_states() -> list[ShardState]:
    """Two shards with tables of every dtype and step mode, clients with numbers, and a group."""
    states = trained(2)
    for state in states:
        for client_id in MEMBERS:
            state.open_client(client_id, heartbeats=True)
        state.void([find(state, "words").table_id], origin(state, MEMBERS[0]))
        state.void([], origin(state, MEMBERS[0]))
        members(BOUNDED, 1, 0, 1)(state)
    push_rows(states, "words", range(100, 110), seed=4, lr=0.05)
    return states


def describe_restored(root: Path) -> Sequence[dict[str, object]]:
    """What a sample brings back on as many shards as wrote it."""
    manifest, folder = Catalogue(root, CLUSTER).read(NAME)
    manifest.check_arithmetic(accept=True)
    plan = dataclasses.replace(make_plan(manifest, manifest.num_shards), keep_clients=True)
    return [describe(state) for state in restore(manifest, folder, plan)]


def make_sample(root: Path) -> None:
    """Writes the sample into a new folder."""
    states = sample_states()
    save(root, states, NAME, segment_bytes=1500)
    expected = [describe(state) for state in states]
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = SAMPLES / NEWEST
    if target.exists():
        sys.exit(f"{target} exists: a sample is made once")
    target.mkdir()
    make_sample(target)
