"""Files of a cut are removed with the checkpoint that failed, and never out of one that is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardam_testing.shard_histories import CLIENTS, make_tables, new_state

from shardam_server.shard.checkpoints.file_names import MANIFEST
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.checkpoints.writing import WriteCut, WriteTerms
from shardam_server.shard.snapshots import Snapshot


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_task_that_is_given_up_leaves_the_files_of_a_whole_checkpoint(tmp_path: Path, is_whole: bool) -> None:
    state = new_state()
    state.install(make_tables())
    state.open_client(CLIENTS[0])
    folder = tmp_path / "test" / "name"
    folder.mkdir(parents=True)
    work = WriteCut(Snapshot(state), WriteTerms("id", 5, 0, 1, tmp_path, "test/name", None, "host", 0))
    names = [file.name for file in work.run(Progress()).files]
    if is_whole:
        (folder / MANIFEST).touch()
    work.discard()
    assert sorted(path.name for path in folder.iterdir()) == (sorted([MANIFEST, *names]) if is_whole else [])
