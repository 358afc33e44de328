"""`python -m torch.distributed.run ... -m shardam.demo`: one worker of the demo. `shardam demo` starts them."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import shardam
from shardam.demo.checkpoints import Terms, restore_cluster
from shardam.demo.dataset import ClickData
from shardam.demo.events import emit
from shardam.demo.stop_request import StopRequest
from shardam.demo.worker import Run, Worker
from shardam_proto.errors import ShardamError

STOP = b"s"
"""What the command writes to the workers' stdin to have them stop after a step; one of them reads it, and tells the others."""


def exit_with_stdin(stop: StopRequest) -> None:
    """Ends this process at once when stdin reaches its end, so that no worker outlives the command that started it.

    Args:
        stop: is told of a request to stop that comes by stdin.
    """

    def watch() -> None:
        while said := os.read(sys.stdin.fileno(), 1024):
            if STOP in said:
                stop.request()
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def main(arguments: list[str]) -> int:
    """Runs one rank; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch.distributed.run ... -m shardam.demo", description=__doc__)
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="written by python -m shardam.demo.prepare")
    parser.add_argument("--cluster", default="default", metavar="NAME", help="name of the cluster behind $SHARDAM_REDIS_URL")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training samples (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial weights and sample order (default 0)")
    parser.add_argument("--mode", default="async", help="async, sync or bounded:N, as shardam.connect takes it (default async)")
    parser.add_argument("--checkpoints", action="store_true", help="the cluster has a folder for checkpoints: signals make one")
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="N", help="one after every N steps (0: none)")
    parser.add_argument("--resume", metavar="latest|NAME|PATH", help="restore the cluster from one and go on from there")
    parser.add_argument("--exit-with-stdin", action="store_true", help="exit at once when stdin reaches its end")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("no RANK in the environment: start workers with `shardam demo`, or under python -m torch.distributed.run")
    stop = StopRequest()
    if options.checkpoints:
        stop.install()
    if options.exit_with_stdin:
        exit_with_stdin(stop)
    torch.set_num_threads(1)  # workers share the machine with the shards and with each other; see also Baseline
    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group("gloo")
        terms = Terms(options.checkpoints, options.checkpoint_every, options.resume, stop)
        run = Run(ClickData.load(options.dataset), options.epochs, options.seed, terms)
        if options.resume is not None:
            restore_cluster(options.resume, options.cluster, run.identity(options.mode))
        with shardam.connect(cluster=options.cluster, mode=options.mode) as cluster:  # in a group: rank and size are torchrun's
            worker = Worker(run, cluster)
            stop.start_training()
            worker.run()
        dist.destroy_process_group()
        if options.checkpoints:
            stop.finish()
    except ShardamError as error:
        emit("error", message=f"worker {rank}: {error.message}", trace=[])
        return 1
    except Exception as error:  # noqa: BLE001 - the edge of the process: torchrun reports an exit status only
        trace = "".join(traceback.format_tb(error.__traceback__)).splitlines()
        emit("error", message=f"worker {rank}: {type(error).__name__}: {error}", trace=trace)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
