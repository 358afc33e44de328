"""Click data as arrays, whatever their source, and the file in which the command line hands them to the workers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardam_proto.errors import BadOption
from shardam_proto.schema import check_name


@dataclasses.dataclass(frozen=True)
class ClickData:
    """Labelled samples of categorical fields and dense features.

    Args:
        title: what the data are, for people; synthetic data say so.
        notes: lines that must be shown with the data (source, citation, terms).
        fields: names of the F categorical fields, which are the names of their tables.
        row_ids: int64 [N, F], raw ids; equal ids of two fields are different rows.
        dense: float32 [N, K], scaled; K may be 0.
        labels: float32 [N], 0 or 1.
        is_test: bool [N].
        shown_field: the field of which the demo shows a row at its end.
        row_titles: names of that field's rows, by id in decimal; may be empty.

    Raises:
        BadOption: a field is no table name, or training or test samples are all of one label.
    """

    title: str
    notes: tuple[str, ...]
    fields: tuple[str, ...]
    row_ids: NDArray[np.int64]
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    is_test: NDArray[np.bool_]
    shown_field: str
    row_titles: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in self.fields:
            check_name(field, "categorical field (it names a table)")
        for part, labels in (("training", self.labels[~self.is_test]), ("test", self.labels[self.is_test])):
            clicks = int(labels.sum())
            if clicks in (0, len(labels)):
                raise BadOption(
                    f"{self.title}: {clicks} of {len(labels)} {part} samples have label 1; training and test part "
                    "(the last tenth) each need both labels, so give more samples"
                )

    @property
    def num_train(self) -> int:
        """Training samples."""
        return int(np.count_nonzero(~self.is_test))

    @property
    def num_test(self) -> int:
        """Test samples."""
        return int(np.count_nonzero(self.is_test))

    def save(self, path: Path) -> None:
        """Writes one .npz file."""
        words = {
            "title": self.title,
            "notes": self.notes,
            "fields": self.fields,
            "shown_field": self.shown_field,
            "row_titles": dict(self.row_titles),
        }
        with path.open("wb") as file:
            np.savez(
                file,
                words=np.array(json.dumps(words)),
                row_ids=self.row_ids,
                dense=self.dense,
                labels=self.labels,
                is_test=self.is_test,
            )

    @classmethod
    def load(cls, path: Path) -> ClickData:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            words = json.loads(str(arrays["words"]))
            return cls(
                title=words["title"],
                notes=tuple(words["notes"]),
                fields=tuple(words["fields"]),
                row_ids=arrays["row_ids"],
                dense=arrays["dense"],
                labels=arrays["labels"],
                is_test=arrays["is_test"],
                shown_field=words["shown_field"],
                row_titles=words["row_titles"],
            )
