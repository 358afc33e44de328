"""Which tables a restore loads."""

from __future__ import annotations

import pytest

from shardam_proto.errors import CheckpointMismatch, SchemaMismatch
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2
from shardam_server.shard.checkpoints.manifest import Manifest, StoredTable
from shardam_server.shard.checkpoints.table_choice import TableChoice, choose_tables


def manifest(*specs: TableSpec) -> Manifest:
    """Returns the manifest of a checkpoint with these tables, and nothing else."""
    return Manifest(
        name="saved",
        checkpoint_id=1,
        created_unix_s=0.0,
        seconds=0.0,
        version="0",
        cluster_name="test",
        cluster_id="aa",
        seed=0,
        timeline=1,
        epoch=1,
        num_shards=1,
        tables=tuple(StoredTable(spec, place, 0, 1, 0) for place, spec in enumerate(specs, start=1)),
        shards=(),
    )


def choose(stored: str, present: str, **options: bool | list[str]) -> TableChoice:
    """Chooses among tables whose names are single letters."""
    specs = {name: TableSpec(name, 2) for name in stored + present}
    asked = checkpoint_pb2.RestoreOptions(**options)  # type: ignore[arg-type]  # names are checked at run time
    return choose_tables(manifest(*(specs[name] for name in stored)), {name: specs[name] for name in present}, asked)


def test_a_cluster_without_tables_gets_all() -> None:
    assert choose("ab", "") == TableChoice(load=("a", "b"), keep=(), created=("a", "b"), skipped=())


def test_equal_sets_are_loaded_whole() -> None:
    assert choose("ab", "ab") == TableChoice(load=("a", "b"), keep=(), created=(), skipped=())


@pytest.mark.case("C069")
def test_missing_and_unexpected_tables_are_both_named_unless_both_are_allowed() -> None:
    for options in ({}, {"allow_missing_tables": True}, {"allow_unexpected_tables": True}):
        with pytest.raises(CheckpointMismatch, match="missing in it are 'c', unexpected are 'b'") as error:
            choose("ab", "ac", **options)
        assert error.value.metadata == {"missing": "c", "unexpected": "b"}
    allowed = choose("ab", "ac", allow_missing_tables=True, allow_unexpected_tables=True)
    assert allowed == TableChoice(load=("a", "b"), keep=("c",), created=("b",), skipped=())


@pytest.mark.case("C069")
def test_named_tables_are_loaded_alone_whatever_else_there_is() -> None:
    assert choose("ab", "ac", tables=["a"]) == TableChoice(load=("a",), keep=("c",), created=(), skipped=("b",))
    assert choose("ab", "ab", tables=["a"]) == TableChoice(load=("a",), keep=("b",), created=(), skipped=("b",))
    with pytest.raises(CheckpointMismatch, match="has no table 'd'; it has 'a', 'b'"):
        choose("ab", "ac", tables=["a", "d"])


@pytest.mark.case("C078")
def test_another_schema_is_refused_with_the_saved_and_the_present_one_the_right_way_round() -> None:
    with pytest.raises(SchemaMismatch) as error:
        choose_tables(manifest(TableSpec("a", 8)), {"a": TableSpec("a", 16)}, checkpoint_pb2.RestoreOptions())
    assert "'a' was saved in checkpoint 'saved' as" in error.value.message
    saved, _, present = error.value.message.partition("and the cluster has it as")
    assert ("dim=8" in saved, "dim=16" in present) == (True, True)
