"""`shardam up --restore`: a cluster that begins with a checkpoint, and one that has a state already."""

from __future__ import annotations

import signal
from pathlib import Path

from shardam_testing.processes import running_shards
from shardam_testing.raw_client import raw_client
from shardam_testing.restoring import create, make_checkpoint, train
from shardam_testing.up_process import ready_of, up

from shardam_proto.schema import TableSpec


def test_up_begins_with_a_checkpoint_and_replaces_no_state(tmp_path: Path) -> None:
    root, state = str(tmp_path / "checkpoints"), str(tmp_path / "state")
    (tmp_path / "first").mkdir()
    with running_shards(tmp_path / "first", 1, checkpoint_dir=root) as shards:
        (table,) = create(shards, TableSpec("t", 4))
        train(shards, table)
        make_checkpoint(shards, "kept")
    flags = ("--json", "--cluster", "test", "--checkpoint-dir", root, "--data-dir", state)
    with up(tmp_path, *flags, "--restore", "test/kept") as running:
        ready = ready_of(running)
        assert all(entry.ready for entry in ready.view().shards.values())
        with raw_client(ready.view()) as home:
            assert home.info("t").table_step == 3
            assert home.open().header.timeline == 2
        assert "goes on from checkpoint kept on timeline 2: t (40 rows, step 3)" in running.log.read_text()
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 0
    with up(tmp_path, *flags, "--restore", "latest") as running:
        assert running.wait() == 1
        log = running.log.read_text()
        assert "the cluster has tables ('t')" in log
        assert "leave --restore out" in log
    with up(tmp_path, *flags) as running, raw_client(ready_of(running).view()) as home:
        assert home.info("t").table_step == 3
        assert home.open().header.timeline == 2


def test_a_checkpoint_that_is_not_there_ends_the_start_with_its_name(tmp_path: Path) -> None:
    with up(tmp_path, "--json", "--data-dir", str(tmp_path / "state"), "--restore", "no-such") as running:
        assert running.wait() == 1
        assert "--restore no-such: there is no checkpoint 'no-such'" in running.log.read_text()
