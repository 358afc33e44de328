"""`shardam demo`: its flags, and the end of the command by a signal.

Neither this nor any other part of the command imports torch or the client: data, model and workers live in `shardam.demo`,
which runs in processes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from shardam_server.command_errors import UsageError
from shardam_server.demo_checkpoints import LATEST, CheckpointOptions, Stopped
from shardam_server.demo_report import DemoReport
from shardam_server.demo_run import Demo, DemoOptions

ABOUT = """
Trains a click model with workers under torchrun against shards on this machine, beside the same model trained locally with
torch.nn.Embedding and torch.optim.SparseAdam, and shows a row that training moved, with its optimizer state.
"""

FILE_FORMAT = """
A file of your own is CSV or TSV: a header line; a column label (0 or 1); columns cat_* (at least one; each is a table; an
integer is its own id, other text is hashed); columns dense_* (numbers); lines in order of time, of which the last tenth is
the test set.
"""

HELP_WIDTH = 120
MAX_PROCESSES = 64
"""Of workers, and of shards, on one machine."""

MAX_STALENESS = 1_000
"""Steps; beyond it a bound bounds nothing in a demo."""

MAX_EPOCHS = 1_000
MAX_STEPS = 10**9
"""Of all epochs: more than any run takes."""

MAX_SEED = 2**63 - 1
"""The largest that torch and NumPy both take as it is."""


def run_demo(arguments: list[str]) -> int:
    """Runs the command and returns its exit status: 0, or 128 + the number of the signal that ended it.

    Ctrl-C while `--keep` keeps everything up is the intended end, hence 0.

    Args:
        arguments: what stands after `shardam demo`.

    Raises:
        UsageError: a flag or the data are wrong.
        CommandError: a process that the demo needs has failed; the message has its last lines.
    """
    options = parse_options(arguments)
    console = Console(stderr=options.as_json)
    with _signals_raise_stopped():
        demo: Demo | None = None
        try:
            with tempfile.TemporaryDirectory(prefix="shardam-demo-") as folder, DemoReport(console) as report:
                demo = Demo(options, Path(folder), report)
                demo.run()
        except Stopped as stopped:
            if demo is not None and demo.finished:
                return 0
            console.print("stopped; nothing of the demo is left running")
            return stopped.exit_code
    return 0


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def parse_options(arguments: list[str]) -> DemoOptions:
    """Reads the flags; `--help` prints and exits.

    Raises:
        UsageError: a flag is unknown or its value is out of range.
    """
    parser = _Parser(
        prog="shardam demo",
        description=ABOUT,
        epilog=FILE_FORMAT,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=HELP_WIDTH),
    )
    parser.add_argument(
        "--data",
        metavar="movielens|synthetic|PATH",
        help="MovieLens-100K ratings (as `make setup` installs them), seeded synthetic click data, or a file of your own "
        "(default: movielens if installed, else synthetic)",
    )
    parser.add_argument(
        "--workers", type=_whole(1, MAX_PROCESSES), default=2, metavar="N", help="training processes (default 2)"
    )
    parser.add_argument("--shards", type=_whole(1, MAX_PROCESSES), default=2, metavar="N", help="shard processes (default 2)")
    parser.add_argument("--epochs", type=_whole(1, MAX_EPOCHS), default=5, metavar="N", help="passes over the data (default 5)")
    parser.add_argument(
        "--seed",
        type=_whole(0, MAX_SEED),
        default=0,
        metavar="N",
        help="seed of initial rows and weights, of the order of samples and of synthetic data (default 0)",
    )
    parser.add_argument(
        "--mode",
        type=_mode,
        default="async",
        metavar="async|sync|bounded:N",
        help="what a step of several workers means; async: a push is applied on arrival; sync: their gradients are one step; "
        "bounded:N: as async, no worker more than N steps ahead of another (default async)",
    )
    parser.add_argument(
        "--data-dir",
        type=_folder,
        metavar="PATH",
        help="folder that keeps rows and moments: a killed shard comes back from it, and another demo with the same folder, "
        "shards and seed trains on from there (default: none, they live in memory and go with the demo)",
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=_folder,
        metavar="PATH",
        help="folder of checkpoints, which Ctrl-C then makes one of, to go on from with --resume (default: `checkpoints` in "
        "the data folder, else none)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=_whole(0, MAX_STEPS),
        default=0,
        metavar="N",
        help="a checkpoint after every N steps (default 0: only when the demo is stopped)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
        type=_checkpoint,
        metavar="latest|NAME|PATH",
        help="go on from a checkpoint of a demo with the same data, workers, mode and seed; without a value from the latest; "
        "the number of shards may be another one",
    )
    parser.add_argument("--keep", action="store_true", help="leave everything up at the end, with URLs to open, until Ctrl-C")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="end stdout with one JSON object; all else goes to stderr"
    )
    values = vars(parser.parse_args(arguments))
    checkpoints = CheckpointOptions(values.pop("checkpoint_dir"), values.pop("checkpoint_every"), values.pop("resume"))
    checkpoints.root(values["data_dir"])
    checkpoints.resumed()
    return DemoOptions(**values, checkpoints=checkpoints)


def _mode(text: str) -> str:
    """Converts a mode; shardam.connect, in the workers, takes the same words."""
    if text in ("async", "sync"):
        return text
    name, _, bound = text.partition(":")
    if name != "bounded" or not (bound.isascii() and bound.isdecimal()) or int(bound) > MAX_STALENESS:
        raise argparse.ArgumentTypeError(f"must be async, sync, or bounded:N with N from 0 to {MAX_STALENESS}, got {text!r}")
    return f"bounded:{int(bound)}"


def _checkpoint(text: str) -> str:
    """Converts a checkpoint's name or path."""
    if not text:
        raise argparse.ArgumentTypeError("must be latest, a checkpoint's name, or a path with a /")
    return text


def _folder(text: str) -> Path | None:
    """Converts a flag that takes a folder, or `none`."""
    if not text:
        raise argparse.ArgumentTypeError("must be a folder, or none for memory only")
    return None if text.lower() == "none" else Path(text).absolute()


def _whole(low: int, high: int) -> Callable[[str], int]:
    """Returns a converter for a flag that takes a whole number from low to high."""

    def convert(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return int(text)

    return convert


@contextlib.contextmanager
def _signals_raise_stopped() -> Iterator[None]:
    """Makes SIGINT and SIGTERM raise Stopped; only the main thread may set handlers, elsewhere it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Stopped(number)

    former = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
