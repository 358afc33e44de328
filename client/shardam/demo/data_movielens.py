"""MovieLens-100K as click data: a rating of 4 or 5 is a click.

The ratings are not part of shardam and must not be: their terms allow research only and no redistribution. They are read
from the installed package `recbole`, found through its metadata and never imported.
"""

from __future__ import annotations

import csv
import importlib.metadata
from pathlib import Path

import numpy as np

from shardam.demo.dataset import ClickData
from shardam.demo.features import ZIP_PREFIX, age_bucket, hour_and_weekday, last_tenth_per_user, row_id
from shardam_proto.errors import BadOption

PACKAGE = "recbole"
FOLDER = "recbole/dataset_example/ml-100k"

FIELDS = ("user", "item", "age", "gender", "occupation", "zip", "year", "hour", "weekday")
"""Of the user, the movie and the moment of rating; one table each."""

CLICK_RATING = 4.0
"""A rating of at least this is a click."""

NOTES = (
    "Source: GroupLens, MovieLens 100K (100,000 ratings of 1,682 movies by 943 users).",
    "Citation: F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. "
    "ACM Transactions on Interactive Intelligent Systems 5, 4, Article 19.",
    "Terms: research use only, no redistribution.",
)


def find_movielens() -> Path | None:
    """Returns the folder with the ratings, or None if no installed package has it."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(distribution.locate_file(FOLDER)))
    return folder if (folder / "ml-100k.inter").is_file() else None


def read_movielens(folder: Path) -> ClickData:
    """Reads ratings, users and movies and codes the nine fields.

    Args:
        folder: holds ml-100k.inter, ml-100k.user and ml-100k.item.

    Raises:
        BadOption: a file is missing or has other columns.
    """
    users = {
        user: (age_bucket(int(age)), row_id(gender), row_id(occupation), row_id(zip_code[:ZIP_PREFIX]))
        for user, age, gender, occupation, zip_code in _read(
            folder / "ml-100k.user", "user_id", "age", "gender", "occupation", "zip_code"
        )
    }
    movies = {
        item: (title, row_id(year))
        for item, title, year in _read(folder / "ml-100k.item", "item_id", "movie_title", "release_year")
    }
    row_ids, labels, timestamps = [], [], []
    for user, item, rating, timestamp in _read(folder / "ml-100k.inter", "user_id", "item_id", "rating", "timestamp"):
        seconds = int(float(timestamp))
        row_ids.append((int(user), int(item), *users[user], movies[item][1], *hour_and_weekday(seconds)))
        labels.append(float(rating) >= CLICK_RATING)
        timestamps.append(seconds)
    ids = np.array(row_ids, dtype=np.int64)
    return ClickData(
        title="MovieLens-100K (a rating of 4 or 5 is a click)",
        notes=NOTES,
        fields=FIELDS,
        row_ids=ids,
        dense=np.zeros((len(ids), 0), dtype=np.float32),
        labels=np.array(labels, dtype=np.float32),
        is_test=last_tenth_per_user(ids[:, 0], np.array(timestamps, dtype=np.int64)),
        shown_field="item",
        row_titles={item: title for item, (title, _) in movies.items()},
    )


def _read(path: Path, *columns: str) -> list[tuple[str, ...]]:
    """Reads the named columns of a tab-separated file whose header writes each as `name:type`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    except FileNotFoundError as error:
        raise BadOption(f"{path} is missing: `make setup` installs the whole data package") from error
    header = [cell.partition(":")[0] for cell in lines[0]]
    missing = [column for column in columns if column not in header]
    if missing:
        raise BadOption(
            f"{path} has no column {missing[0]!r} but {header}: `make setup` installs the version of {PACKAGE} that has it"
        )
    places = [header.index(column) for column in columns]
    return [tuple(line[place] for place in places) for line in lines[1:]]
