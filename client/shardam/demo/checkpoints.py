"""The demo's checkpoints: what a worker adds to the tables' state, and a run that goes on from it bit for bit.

Rank 0's addition is enough for all ranks: the dense replicas are equal, and the ranks take their steps together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

import shardam
from shardam.demo.dataset import ClickData
from shardam.demo.events import emit
from shardam.demo.stop_request import StopRequest
from shardam_proto.errors import CheckpointMismatch, ShardamError

FORMAT = 1
"""Of the addition; another one is refused."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """When a run makes checkpoints, and from which one it goes on.

    Args:
        enabled: the cluster has a folder for them; else neither steps nor signals make any.
        every: a checkpoint after so many steps; 0: only when the run is told to stop.
        resume: the checkpoint from which it goes on: a name, a path or "latest"; None: it begins.
        stop: tells when to end.
    """

    enabled: bool
    every: int
    resume: str | None
    stop: StopRequest


@dataclasses.dataclass
class Position:
    """How far the training has come.

    Args:
        epoch: the epoch that is trained, from 1.
        batches: batches of it that are done.
        steps: steps of each worker over all epochs.
    """

    epoch: int = 1
    batches: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be equal for a run to go on from another's checkpoint; else its batches would be others.

    Args:
        data: title of the data.
        samples: number of training samples.
        seed: of the order of samples.
        workers: their number.
        batch_size: samples of a step over all workers.
        mode: async, sync or bounded:N.
    """

    data: str
    samples: int
    seed: int
    workers: int
    batch_size: int
    mode: str

    @classmethod
    def of(cls, data: ClickData, seed: int, batch_size: int, mode: str) -> Identity:
        """Returns this run's."""
        return cls(data.title, data.num_train, seed, dist.get_world_size(), batch_size, mode)

    def check(self, saved: Mapping[str, object], name: str) -> None:
        """Refuses to go on from another kind of run.

        Raises:
            CheckpointMismatch: the message has both values of what differs.
        """
        own = dataclasses.asdict(self)
        differing = [key for key in own if own[key] != saved.get(key)]
        if differing:
            described = "; ".join(f"{key} is {saved.get(key)!r} there and {own[key]!r} here" for key in differing)
            raise CheckpointMismatch(
                f"the run of checkpoint {name!r} was another one: {described}. Go on with the flags of that run, or start "
                "without --resume"
            )


def restore_cluster(name: str, cluster: str, identity: Identity) -> None:
    """Replaces the cluster's state by a checkpoint's, on rank 0 while the others wait; call it on all, before they connect.

    Args:
        name: the checkpoint.
        cluster: the cluster's name.
        identity: of this run; one that differs is refused while the cluster still has its state.

    Raises:
        CheckpointMismatch: on rank 0, as read_addition.
        ShardamError: on rank 0, why it cannot be restored.
    """
    if dist.get_rank() == 0:
        with shardam.connect(cluster=cluster) as client:
            read_addition(client, name, identity)
            client.restore(name)
    dist.barrier()


def read_addition(cluster: shardam.Cluster, name: str, identity: Identity) -> dict[str, Any]:
    """Returns what rank 0 added to a checkpoint.

    Raises:
        CheckpointMismatch: it is of another kind of run, or the checkpoint was not made by the demo.
    """
    addition = cluster.extra(name, rank=0)
    if not isinstance(addition, dict) or addition.get("demo") != FORMAT:
        raise CheckpointMismatch(
            f"checkpoint {name!r} was not made by this version's demo, which adds its model and position; a cluster of its own "
            f"takes it: shardam up --restore"
        )
    identity.check(addition["identity"], name)
    return addition


class Keeper:
    """Makes the run's checkpoints; every rank has one and calls it after the same steps.

    Args:
        terms: when.
        cluster: this rank's connection.
    """

    def __init__(self, terms: Terms, cluster: shardam.Cluster) -> None:
        self._terms = terms
        self._cluster = cluster
        self._rank = dist.get_rank()

    @property
    def stops(self) -> bool:
        """Asks all ranks whether one of them was told to stop, so that all do so after the same step."""
        return self._terms.enabled and self._terms.stop.of_any_rank()

    def is_due(self, steps: int) -> bool:
        """True: a checkpoint is made after so many steps."""
        return self._terms.enabled and self._terms.every > 0 and steps % self._terms.every == 0

    def make(self, position: Position, addition: dict[str, Any]) -> str | None:
        """Makes a checkpoint of this moment; all pushes of the ranks' steps so far must be applied.

        In a group the members make it together; in async mode rank 0 makes it while the others wait. One that fails is told,
        and training goes on.

        Args:
            position: where the training is.
            addition: what rank 0 adds.

        Returns:
            Its name, on rank 0; None elsewhere, or where it failed.
        """
        name = None
        dist.barrier()  # the pushes of all ranks are applied, and none of the next step has begun
        if self._rank == 0 or self._cluster.mode != "async":
            try:
                name = self._cluster.checkpoint(extra=addition if self._rank == 0 else None).name
            except ShardamError as error:
                if self._rank == 0:
                    emit("checkpoint_failed", steps=position.steps, message=error.message)
        dist.barrier()
        if self._rank == 0 and name is not None:
            emit("checkpoint", name=name, epoch=position.epoch, steps=position.steps)
        return name if self._rank == 0 else None
