"""One process at a time has a shard's folder, and it is the right folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shardam_testing.shard_histories import abandon, all_bits, begin_store, bits_after, every_change, lock_store, new_state

from shardam_server.command_errors import CommandError
from shardam_server.shard.journal.folder_lock import FolderHeld, FolderRefused
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import StateStore

HOLD = """
import sys
from pathlib import Path
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import StateStore

store = StateStore.lock(Path(sys.argv[1]), "oak", 0, JournalOptions())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_refused_while_its_owner_lives_even_stopped_and_free_once_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "held\n"
            for stop in (False, True):
                if stop:
                    os.kill(owner.pid, signal.SIGSTOP)
                with pytest.raises(FolderHeld, match=rf"held by process {owner.pid}, .*kill it first \(kill -9 {owner.pid}\)"):
                    lock_store(tmp_path)
        finally:
            owner.kill()
        owner.wait(timeout=60)
        lock_store(tmp_path).release()


def test_a_second_start_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    store = lock_store(tmp_path)
    with pytest.raises(CommandError, match=f"held by process {os.getpid()},"):
        lock_store(tmp_path)
    store.release()
    lock_store(tmp_path).release()


def test_looking_at_a_folder_changes_nothing_in_it(tmp_path: Path) -> None:
    store = lock_store(tmp_path)
    assert store.current is None
    store.release()
    assert [path.name for path in store.path.iterdir()] == ["LOCK"]


@pytest.mark.parametrize(("name", "index"), [("oak", 1), ("elm", 0)])
def test_the_folder_of_another_shard_or_cluster_is_refused(tmp_path: Path, name: str, index: int) -> None:
    state = new_state()
    store = begin_store(tmp_path, state)
    every_change()[0](state)
    abandon(store)
    other = tmp_path / name / f"shard-{index}"
    other.parent.mkdir(exist_ok=True)
    store.path.rename(other)
    with pytest.raises(FolderRefused, match=f"holds shard 0 of cluster 'oak', not shard {index} of '{name}'"):
        StateStore.lock(tmp_path, name, index, JournalOptions())
    other.rename(store.path)
    assert bits_after(tmp_path) == all_bits(state)


def test_folders_and_files_are_the_owner_s_alone(tmp_path: Path) -> None:
    state = new_state()
    store = begin_store(tmp_path / "new", state)
    every_change()[0](state)
    abandon(store)
    for folder in (store.path, store.path.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    for path in store.path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_path_that_cannot_be_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderRefused, match="cannot be used for the shard's state") as error:
        lock_store(tmp_path / "file")
    assert "\n" not in str(error.value)
