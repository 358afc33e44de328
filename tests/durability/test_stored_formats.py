"""Folders that earlier programs wrote come back with the values of their time (shardam_testing/journal_samples.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from shardam_testing.journal_samples import BASE_AFTER, NEWEST, SAMPLES, describe, make_samples
from shardam_testing.shard_histories import come_back

SETS = sorted(SAMPLES.glob("format-*"))


def test_there_are_samples_of_the_present_format() -> None:
    assert NEWEST in [folder.name for folder in SETS]


@pytest.mark.parametrize("name", BASE_AFTER)
@pytest.mark.parametrize("samples", SETS, ids=lambda folder: folder.name)
def test_a_stored_folder_comes_back_with_its_values(tmp_path: Path, samples: Path, name: str) -> None:
    shutil.copytree(samples / name, tmp_path, dirs_exist_ok=True)
    with come_back(tmp_path) as (_, state):
        assert describe(state) == json.loads((samples / "expected.json").read_text(encoding="utf-8"))


def test_the_script_makes_samples_that_come_back_with_its_values(tmp_path: Path) -> None:
    make_samples(tmp_path)
    expected = json.loads((tmp_path / "expected.json").read_text(encoding="utf-8"))
    for name in BASE_AFTER:
        with come_back(tmp_path / name) as (_, state):
            assert describe(state) == expected
