"""Manifests: what is written is read, and what is read is not trusted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import CheckpointDamaged, VersionMismatch
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform, XavierNormal
from shardam_server.shard.checkpoints import manifest as manifest_module
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest, ShardFiles, StoredTable

PATH = Path("/checkpoints/oak/one/manifest.json")

XXH3 = "0123456789abcdef" * 2

OPTIONS = AdamOptions(lr=0.1 + 1e-17, betas=(0.8, 0.99), eps=1e-9, weight_decay=0.01, decoupled_weight_decay=True)


def make_manifest() -> Manifest:
    return Manifest(
        name="one",
        checkpoint_id=2**62 + 3,
        created_unix_s=1796050000.25,
        seconds=1.5,
        version="1.0.0",
        cluster_name="oak",
        cluster_id="c0ffee",
        seed=2**64 - 1,
        timeline=3,
        epoch=4,
        num_shards=2,
        tables=(
            StoredTable(TableSpec("words", 3, init=Normal(0.1, 0.3)), 2**61 + 1, 2**63 + 7, 10, 3, OPTIONS),
            StoredTable(TableSpec("users", 4, dtype="bfloat16", init=Uniform(-0.5, 0.5), step="row"), 2, 3, 0, 0),
            StoredTable(TableSpec("tags", 1, init=Constant(0.25), num_embeddings=7, padding_idx=-1), 3, 3, 1, 2),
            StoredTable(TableSpec("items", 2, dtype="float16", init=XavierNormal(), num_embeddings=7), 4, 3, 1, 0),
        ),
        shards=(
            ShardFiles(
                0,
                "host-a",
                "/mnt/oak/one",
                99,
                (
                    CheckpointFile("shard-0-of-2-000.rows", 1000, XXH3, 4),
                    CheckpointFile("shard-0-of-2-001.rows", 1000, XXH3, 1),
                    CheckpointFile("shard-0-of-2-002.rows", 100, XXH3),
                ),
            ),
            ShardFiles(1, "host-b", "/srv/oak/one", 98, (CheckpointFile("shard-1-of-2-000.rows", 100, XXH3),)),
        ),
        clients={b"a" * 16: 7, b"\x00\xff" * 8: 2**40},
        extra={0: CheckpointFile("extra-rank-0.safetensors", 5, XXH3), 3: CheckpointFile("extra-rank-3.safetensors", 6, XXH3)},
        group_step=12,
    )


def content_of(manifest: Manifest) -> dict[str, object]:
    content = json.loads(manifest.to_json())["content"]
    assert isinstance(content, dict)
    return content


def signed(content: object) -> str:
    """A manifest's text whose checksum fits, as one who alters it on purpose would write it."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return json.dumps({"checksum": xxhash.xxh3_64_hexdigest(canonical.encode()), "content": content})


def altered(**fields: object) -> str:
    return signed(content_of(make_manifest()) | fields)


def refused(text: str | bytes) -> str:
    with pytest.raises(CheckpointDamaged) as error:
        Manifest.from_json(text, PATH)
    assert error.value.metadata["file"] == str(PATH)
    assert str(PATH) in str(error.value)
    return str(error.value)


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = make_manifest()
    assert Manifest.from_json(manifest.to_json(), PATH) == manifest
    assert Manifest.from_json(manifest.to_json().encode(), PATH).to_json() == manifest.to_json()
    assert (manifest.num_rows, manifest.size_bytes, manifest.change_number) == (5, 2211, 99)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "{}", "null", '{"checksum": "x"}', "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000, "NaN", "1" * 5000],
    ids=["empty", "list", "no fields", "null", "no content", "no text", "deep", "NaN", "long number"],
)
def test_what_is_no_manifest_is_refused(text: str | bytes) -> None:
    refused(text)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    refused(f"cbuiltins\nopen\n(S'{marker}'\nS'w'\ntR.".encode())
    assert not marker.exists()


@given(place=st.integers(0, 10_000), bits=st.integers(1, 255))
@settings(deadline=None)
def test_no_changed_byte_changes_what_a_manifest_says(place: int, bits: int) -> None:
    data = bytearray(make_manifest().to_json().encode())
    data[place % len(data)] ^= bits
    try:
        found = Manifest.from_json(bytes(data), PATH)
    except (CheckpointDamaged, VersionMismatch):
        return
    assert found == make_manifest(), "white space alone may change"


@given(end=st.integers(0, 10_000))
@settings(deadline=None)
def test_a_manifest_that_was_cut_off_is_refused(end: int) -> None:
    text = make_manifest().to_json().rstrip()
    refused(text[: end % len(text)])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """All fields within a JSON value."""
    inner: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    found = [(*path, key) for key, _ in inner]
    return found + [place for key, one in inner for place in places(one, (*path, key))]


def put(value: object, place: tuple[str | int, ...], new: object) -> None:
    for key in place[:-1]:
        value = value[key]  # type: ignore[index]
    value[place[-1]] = new  # type: ignore[index]


PLACES = places(content_of(make_manifest()))


@given(place=st.sampled_from(PLACES), value=JSON_VALUES)
@settings(deadline=None, max_examples=300)
def test_any_value_in_any_place_is_refused_or_means_itself(place: tuple[str | int, ...], value: object) -> None:
    content = content_of(make_manifest())
    put(content, place, value)
    try:
        found = Manifest.from_json(signed(content), PATH)
    except (CheckpointDamaged, VersionMismatch):
        return
    assert Manifest.from_json(found.to_json(), PATH) == found


@pytest.mark.parametrize(
    "name",
    ["../shard-0-of-2-000.rows", "/etc/passwd", "shard-1-of-2-000.rows", "shard-0-of-2-000.rows/x", "shard-0-of-2-000.pkl", ""],
)
@pytest.mark.case("C081")
def test_a_file_name_is_the_one_that_its_place_has(name: str) -> None:
    content = content_of(make_manifest())
    put(content, ("shards", 0, "files", 0, "name"), name)
    assert "it should be 'shard-0-of-2-000.rows'" in refused(signed(content))
    content = content_of(make_manifest())
    put(content, ("extra", 0, "file", "name"), name)
    assert "it should be 'extra-rank-0.safetensors'" in refused(signed(content))


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("shards", 0, "files", 0, "num_rows"), 2**62, "cannot have"),
        (("tables", 0, "num_rows"), 4, "its tables have 6 rows, its files 5"),
        (("tables", 2, "num_rows"), 8, "num_rows is not an integer from 0 to 7"),
        (("tables", 0, "table_id"), 2, "the same id"),
        (("tables", 0, "spec", "name"), "users", "the same name"),
        (("tables", 0, "spec", "dim"), 2**31, "dim"),
        (("tables", 0, "spec", "other"), 1, "other"),
        (("tables", 0, "last_options", "lr"), "NaN", "not finite"),
        (("num_shards",), 3, "should be"),
        (("num_shards",), 2**40, "4096"),
        (("shards",), [], "shards 0 to 1"),
        (("shards", 1, "index"), 0, "should be"),
        (("shards", 1, "files"), [], "lacks the file without rows"),
        (("shards", 0, "files", 0, "size_bytes"), -1, "size_bytes"),
        (("shards", 0, "files", 0, "xxh3"), "x", "32 hex digits"),
        (("checkpoint_id",), "f" * 16, "63-bit"),
        (("clients",), {"zz": 1}, "client id"),
        (("name",), "../x", "not allowed"),
        (("created_unix_s",), -1, "seconds"),
        (("created_unix_s",), 10**400, "seconds"),
    ],
)
def test_values_that_do_not_go_together_are_refused(place: tuple[str | int, ...], value: object, problem: str) -> None:
    content = content_of(make_manifest())
    put(content, place, value)
    assert problem in refused(signed(content))


@pytest.mark.case("C076")
@pytest.mark.parametrize("place", [(), ("tables", 0), ("shards", 0), ("shards", 0, "files", 0)])
def test_a_manifest_that_names_a_base_is_refused_since_checkpoints_are_full(place: tuple[str | int, ...]) -> None:
    content = content_of(make_manifest())
    put(content, (*place, "base"), "20261130T000000-0001")
    with pytest.raises(VersionMismatch, match="'base', which this shardam does not know"):
        Manifest.from_json(signed(content), PATH)


@pytest.mark.parametrize("field", ["format", "arithmetic"])
def test_a_newer_version_is_named(field: str) -> None:
    with pytest.raises(VersionMismatch, match=f"{field} version 2, this shardam knows 1") as error:
        Manifest.from_json(altered(**{field: 2, "more": "than is known"}), PATH)
    assert error.value.metadata == {"file": str(PATH), "found": "2", "known": "1"}


def test_an_older_format_is_refused() -> None:
    with pytest.raises(VersionMismatch, match="format version 0"):
        Manifest.from_json(altered(format=0), PATH)


def test_an_older_arithmetic_is_read_and_needs_to_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_manifest().to_json()
    monkeypatch.setattr(manifest_module, "ARITHMETIC_VERSION", 2)
    manifest = Manifest.from_json(text, PATH)
    assert manifest.arithmetic == 1
    with pytest.raises(VersionMismatch, match=r"arithmetic version 1, this shardam has 2.*--accept-arithmetic-change"):
        manifest.check_arithmetic()
    manifest.check_arithmetic(accept=True)


def test_numbers_that_are_not_finite_are_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(make_manifest(), seconds=math.inf).to_json()


def test_no_code_opens_a_pickle() -> None:
    folder = Path(manifest_module.__file__).parent
    sources: Mapping[str, str] = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    for name, source in sources.items():
        assert "pickle" not in source, name
        assert "torch" not in source, name
