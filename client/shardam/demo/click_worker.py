"""`python -m shardam.demo.click_worker`: trains the click model on synthetic data against a cluster that is there already.

What docker-compose.yml starts as its workers. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment make it one of
a group, as torch.distributed reads them; without RANK it is a group of its own. $SHARDAM_REDIS_URL and $SHARDAM_TOKEN lead
to the cluster. It waits by itself for the other workers, Redis and the shards, and ends with status 0 after the last epoch,
or after the current step when any worker of the group is told to stop (SIGTERM, SIGINT).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardam
from shardam.demo.data_synthetic import make_synthetic
from shardam.demo.model import DenseTower, ShardedFields
from shardam.demo.stop_request import StopRequest
from shardam.demo.train import LEARNING_RATE, Share, Trainer, choose_batch_size, evaluate, split
from shardam_proto.errors import ShardamError

logger = logging.getLogger(__name__)

REPORT_STEPS = 10
"""A line of the log for so many steps: every second or so."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What all workers of a group agree on.

    Args:
        epochs: passes over the training samples, >= 1.
        seed: of the data, of the tower's initial weights and of the order of samples; >= 0.
    """

    epochs: int
    seed: int


class ClickWorker:
    """One rank; the process group must exist.

    Args:
        run: the same on all ranks.
        cluster: this process's connection.
        stop: tells when to end.
    """

    def __init__(self, run: Run, cluster: shardam.Cluster, stop: StopRequest) -> None:
        self._run = run
        self._stop = stop
        data = make_synthetic(run.seed)  # on every rank the same
        self._train, self._test = split(data, data.row_ids)
        workers = dist.get_world_size()
        self._share = Share(dist.get_rank(), workers, choose_batch_size(len(self._train), workers))
        self._fields = ShardedFields(data.fields, cluster)
        torch.manual_seed(run.seed)
        self._tower = DenseTower(len(data.fields), data.dense.shape[1])
        self._sparse = shardam.SparseAdam(self._fields.tables, lr=LEARNING_RATE)
        replica = DistributedDataParallel(self._tower)
        dense = torch.optim.Adam(replica.parameters(), lr=LEARNING_RATE)
        self._trainer = Trainer(self._fields, replica, [self._sparse, dense])
        self._step = 0

    def run(self) -> None:
        """Trains all epochs, or until any worker is told to stop; every push is applied when it returns."""
        self._stop.start_training()
        for epoch in range(1, self._run.epochs + 1):
            if not self._train_epoch(epoch):
                logger.info("told to stop: stops after step %d", self._step)
                break
        else:
            logger.info("done after step %d", self._step)
        self._sparse.synchronize()

    def _train_epoch(self, epoch: int) -> bool:
        """Returns False if it was cut short."""
        for batch in self._share.batches(len(self._train), self._run.seed, epoch):
            if self._stop.of_any_rank():
                return False
            self._trainer.step(self._train.take(batch))
            self._step += 1
            if self._step % REPORT_STEPS == 0:
                logger.info("step %d, epoch %d of %d", self._step, epoch, self._run.epochs)
        self._sparse.synchronize()
        if dist.get_rank() == 0:
            auc, log_loss = evaluate(self._fields, self._tower, self._test)
            logger.info("epoch %d: AUC %.4f, log loss %.4f on the test samples", epoch, auc, log_loss)
        return True


def _join_group() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shardam.demo.click_worker", description=__doc__)
    parser.add_argument("--cluster", default="default", metavar="NAME", help="name of the cluster behind $SHARDAM_REDIS_URL")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training samples (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, initial weights and sample order (default 0)")
    parser.add_argument(
        "--shard-timeout-s", type=float, default=300.0, help="seconds to wait for Redis and shards, also later (default 300)"
    )
    options = parser.parse_args(arguments)
    if options.epochs < 1 or options.seed < 0:
        parser.error(f"--epochs must be 1 or more and --seed 0 or more, got {options.epochs} and {options.seed}")
    return options


def main(arguments: list[str]) -> int:
    """Runs one worker; returns its exit status."""
    options = _parse(arguments)
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s: %(message)s [worker={rank}]")
    stop = StopRequest()
    stop.install()
    torch.set_num_threads(1)  # workers share the machine with the shards and with each other
    try:
        logger.info("waits for the other workers")
        _join_group()
        logger.info("waits for cluster %s", options.cluster)
        with shardam.connect(cluster=options.cluster, shard_timeout_s=options.shard_timeout_s) as cluster:
            ClickWorker(Run(options.epochs, options.seed), cluster, stop).run()
        dist.destroy_process_group()
        stop.finish()
    except ShardamError as error:
        logger.error("%s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
