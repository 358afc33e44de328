"""What `up` says of the place where rows live, and how it hands it to its shards."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from shardam_proto.registry import ShardEntry
from shardam_server.banner import Banner
from shardam_server.child_commands import ChildCommands
from shardam_server.command_errors import UsageError
from shardam_server.data_folder import aftermath_of_a_kill, describe_checkpoints, describe_durability, prepare_data_dir
from shardam_server.flags import parse_settings
from shardam_server.settings import ShardSettings, UpSettings

FOLDER = Path("/var/lib/shardam")
REDIS = "redis://127.0.0.1:1/0"


def shard_settings(*flags: str, has_served: bool = False) -> ShardSettings:
    """Returns the settings that shard 1 of `up` with these flags reads from its command line."""
    settings = parse_settings("up", UpSettings, flags, "")
    spec = ChildCommands(settings, REDIS).shard(1, lambda: 7071, lambda: has_served)
    command = list(spec.command())
    assert all(name not in spec.environment for name in ("SHARDAM_DATA_DIR", "SHARDAM_JOURNAL", "SHARDAM_TRUNCATE_JOURNAL"))
    return parse_settings("shard", ShardSettings, [*command[command.index("shard") + 1 :], "--redis", REDIS], "")


def test_a_folder_is_made_for_its_owner_alone_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "shardam"
    prepare_data_dir(folder)
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (folder / "kept").write_text("x")
    folder.chmod(0o750)
    prepare_data_dir(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert [path.name for path in folder.iterdir()] == ["kept"]


@pytest.mark.parametrize("below", ["", "below"], ids=["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_refused_in_one_line_with_both_remedies(tmp_path: Path, below: str) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(UsageError) as caught:
        prepare_data_dir(path / below)
    assert str(caught.value).startswith(f"--data-dir {path / below} cannot be written (")
    assert str(caught.value).endswith("name another folder, or keep rows in memory only with --data-dir none")
    assert "\n" not in str(caught.value)


def test_every_setting_of_the_state_reaches_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_DATA_DIR", "/elsewhere")
    monkeypatch.setenv("SHARDAM_MAX_CLIENTS", "7")
    given = ["--journal", "fsync", "--on-journal-full", "refuse", "--journal-limit-mib", "9", "--client-lease-s", "2.5"]
    given += ["--max-queue-mib", "3", "--max-reserved-mib", "4", "--max-parked", "5", "--keep-free-mib", "6"]
    shard = shard_settings(*given)
    assert (shard.data_dir, shard.journal, shard.on_journal_full) == (Path("/elsewhere"), "fsync", "refuse")
    assert (shard.journal_limit_mib, shard.client_lease_s, shard.max_queue_mib) == (9, 2.5, 3)
    assert (shard.max_reserved_mib, shard.max_parked, shard.max_clients, shard.keep_free_mib) == (4, 5, 7, 6)


def test_without_a_folder_the_shards_are_told_so_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_DATA_DIR", "/elsewhere")
    shard = shard_settings("--data-dir", "none")
    assert (shard.data_dir, shard.journal_mode) == (None, "off")


def test_a_journal_is_truncated_until_the_shard_has_served_and_never_by_a_later_restart() -> None:
    assert shard_settings("--truncate-journal").truncate_journal
    assert not shard_settings("--truncate-journal", has_served=True).truncate_journal
    assert not shard_settings().truncate_journal


@pytest.mark.parametrize(
    ("data_dir", "journal", "words"),
    [
        (None, "off", "memory only: a killed shard loses them"),
        (FOLDER, "off", "(journal: off): a stop keeps them, a killed shard loses what has changed"),
        (FOLDER, "write", "(journal: write): a killed shard comes back with them"),
        (FOLDER, "fsync", "(journal: fsync): a killed shard comes back with them, also after a power loss"),
    ],
)
def test_the_banner_says_where_rows_live_and_what_a_kill_costs(data_dir: Path | None, journal: str, words: str) -> None:
    entry = ShardEntry(0, "127.0.0.1:7070", "127.0.0.1:9", 1, 2, "cpu", 3, ready=True)
    banner = Banner("default", REDIS, True, "http://127.0.0.1:8080", [entry], False, data_dir, journal)
    line = describe_durability(data_dir, journal)
    assert words in line
    assert line in banner.as_text().splitlines()
    said = json.loads(banner.as_json())
    assert (said["data_dir"], said["journal"]) == (None if data_dir is None else str(FOLDER), journal)


@pytest.mark.parametrize(
    ("every_s", "keep", "words"),
    [(0.0, 5, "`shardam checkpoint create`"), (900.0, 3, "one every 900 s, of which the last 3 stay"), (9.0, 0, "all stay")],
)
def test_the_banner_says_where_checkpoints_lie_and_when_they_are_made(every_s: float, keep: int, words: str) -> None:
    line = describe_checkpoints(FOLDER, every_s, keep)
    assert line is not None
    assert str(FOLDER) in line
    assert words in line
    banner = Banner("default", REDIS, True, "http://127.0.0.1:8080", [], False, FOLDER, "write", line)
    assert line in banner.as_text().splitlines()
    assert describe_checkpoints(None, 0.0, 5) is None


@pytest.mark.parametrize(
    ("data_dir", "journal", "words"),
    [
        (FOLDER, "write", "it restarts from its data folder in /var/lib/shardam"),
        (
            None,
            "off",
            "were in memory only and are lost: it will be LOST, and serve nothing, until `shardam forget-shard --index 3`",
        ),
        (FOLDER, "off", "since its last clean stop is lost (--journal off); it starts with --truncate-journal only"),
    ],
)
def test_the_death_of_a_shard_is_logged_with_what_becomes_of_its_rows(data_dir: Path | None, journal: str, words: str) -> None:
    assert words in aftermath_of_a_kill(3, data_dir, journal)
