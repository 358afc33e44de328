"""Checkpoints that earlier programs wrote come back with the values of their time (shardam_testing/checkpoint_samples.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shardam_testing.checkpoint_files import CLUSTER, check, make_plan, restore, rows_of
from shardam_testing.checkpoint_samples import NAME, NEWEST, describe_restored, make_sample
from shardam_testing.journal_samples import SAMPLES

from shardam_server.shard.checkpoints.catalogue import Catalogue

SETS = sorted(SAMPLES.glob("checkpoint-*"))


def test_there_is_a_sample_of_the_present_format() -> None:
    assert NEWEST in [root.name for root in SETS]


@pytest.mark.parametrize("root", SETS, ids=lambda root: root.name)
def test_a_stored_checkpoint_comes_back_with_its_values(root: Path) -> None:
    assert describe_restored(root) == json.loads((root / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("root", SETS, ids=lambda root: root.name)
def test_a_stored_checkpoint_comes_back_on_other_numbers_of_shards(root: Path, num_shards: int) -> None:
    manifest, folder = Catalogue(root, CLUSTER).read(NAME)
    check(root, folder, num_shards)
    found = restore(manifest, folder, make_plan(manifest, num_shards))
    assert rows_of(found) == rows_of(restore(manifest, folder, make_plan(manifest, manifest.num_shards)))


def test_the_script_makes_a_sample_that_comes_back_with_its_values(tmp_path: Path) -> None:
    make_sample(tmp_path)
    assert describe_restored(tmp_path) == json.loads((tmp_path / "expected.json").read_text(encoding="utf-8"))
