"""What must hold of a cluster's checkpoints: each shard's files are what a replay of its journal gives at the cut."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from shardam_proto.v1 import checkpoint_pb2
from shardam_testing.faults.checkpoint_files import StoredCheckpoint, compare_shard, read_checkpoint
from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.state_files import oracles_at


@dataclasses.dataclass
class ComparedCheckpoints:
    """Checkpoints that were read and compared.

    Attributes:
        checkpoints: those that are complete and of the present timeline, the oldest first.
        num_comparisons: parts of a shard that were compared with its journal's replay.
        mismatches: what differed.
    """

    checkpoints: list[StoredCheckpoint]
    num_comparisons: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Checks that nothing differed.

        Raises:
            AssertionError: something did.
        """
        assert self.mismatches == [], "\n".join(self.mismatches)


def compare_checkpoints(cluster: FaultCluster) -> ComparedCheckpoints:
    """Reads every complete checkpoint of the present state and compares it. Nothing may change the state meanwhile.

    What a shard's journal holds no more, since a base covers it, is passed over.
    """
    statuses = cluster.statuses()
    timeline = statuses[0].header.timeline
    infos = [info for info in complete(cluster.checkpoints.list()) if info.timeline == timeline]
    infos = [info for info in infos if info.num_shards == cluster.num_shards]
    compared = ComparedCheckpoints([read_checkpoint(cluster.checkpoint_folder(info.name)) for info in reversed(infos)])
    for index, status in enumerate(statuses):
        _compare_shard(index, Path(status.data_folder), compared)
    return compared


def complete(infos: Sequence[checkpoint_pb2.CheckpointInfo]) -> list[checkpoint_pb2.CheckpointInfo]:
    """Returns those that are complete."""
    return [info for info in infos if info.complete]


def _compare_shard(index: int, folder: Path, compared: ComparedCheckpoints) -> None:
    by_change = collections.defaultdict(list)
    for checkpoint in compared.checkpoints:
        by_change[checkpoint.shards[index].change_number].append(checkpoint)
    for oracle in oracles_at(folder, by_change):
        for checkpoint in by_change[oracle.change_number]:
            compared.num_comparisons += 1
            compared.mismatches += compare_shard(checkpoint, checkpoint.shards[index], oracle)
