"""The folder of a LocalCluster, as it is handed in; what a kill leaves is in tests/fault/test_up_comes_back.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardam import LocalCluster
from shardam.errors import BadOption, ShardNotReady


@pytest.mark.parametrize("data_dir", ["", 7, b"/bytes", True])
def test_what_is_no_folder_is_refused_before_anything_starts(data_dir: object) -> None:
    with pytest.raises(BadOption, match="data_dir must be the path of a folder, or None for memory only"):
        LocalCluster(data_dir=data_dir)  # type: ignore[arg-type]  # what a caller may pass by mistake


def test_the_word_of_the_command_line_for_memory_only_is_refused_with_both_ways_to_say_what_is_meant() -> None:
    with pytest.raises(BadOption, match=r"pass None for memory only, or './none' for a folder of that name"):
        LocalCluster(data_dir="none")


def test_the_folder_is_said_as_an_absolute_path_and_without_one_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SHARDAM_DATA_DIR", str(tmp_path / "anothers"))
    with LocalCluster(1, data_dir="rows") as cluster:
        assert cluster.data_dir == tmp_path / "rows"
        assert (tmp_path / "rows").is_dir()
    with LocalCluster(1) as cluster:
        assert cluster.data_dir is None
    assert {path.name for path in tmp_path.iterdir()} == {"rows"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ShardNotReady, match=rf"ended with exit status 2 .*\n.*--data-dir {path} cannot be written"):
        LocalCluster(1, data_dir=path)
