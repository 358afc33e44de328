"""Damaged, foreign and missing checkpoints, and folders that cannot be used: an error with file and remedy, and nothing else.

After each of them the state is what it was, and a worker trains on.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardam_testing.faults.checkpoint_files import MANIFEST, read_checkpoint
from shardam_testing.faults.cluster import FaultCluster, running_fault_cluster
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import all_rows, run_differences
from shardam_testing.processes import Shards, running_valkey
from shardam_testing.raw_client import raw_client
from shardam_testing.waiting import wait_for

from shardam_proto.errors import ShardamError
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, job_pb2, shard_pb2

HANG_S = 200.0
"""What takes seconds on an idle machine."""

pytestmark = pytest.mark.timeout(HANG_S)

NAME = "good"
NUM_SHARDS = 2
COUNT = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    """A cluster with a checkpoint, trained on since."""
    with running_fault_cluster(tmp_path_factory.mktemp("cluster"), NUM_SHARDS) as running:
        train(running)
        running.checkpoints.done(running.checkpoints.create(NAME))
        train(running)
        yield running


def train(cluster: FaultCluster) -> None:
    """Has a worker make changes and leave."""
    worker = cluster.workers.start(len(cluster.workers.started), COUNT, in_flight=4)
    assert cluster.wait_end(worker) == 0, f"{worker.noted.error}\n{worker.log_text()}"


def segment(cluster: FaultCluster, index: int = 1) -> Path:
    """Returns the first file of a shard."""
    return sorted(cluster.checkpoint_folder(NAME).glob(f"shard-{index}-of-*.rows"))[0]


@contextlib.contextmanager
def changed(path: Path, content: bytes | None) -> Iterator[None]:
    """Gives a file another content, or removes it, for the block."""
    before = path.read_bytes()
    path.unlink()
    try:
        if content is not None:
            path.write_bytes(content)
        yield
    finally:
        path.write_bytes(before)


@contextlib.contextmanager
def untouched(cluster: FaultCluster) -> Iterator[None]:
    """Checks that the block leaves state and timeline as they are, and training possible."""
    before, timelines = all_rows(cluster), [status.header.timeline for status in cluster.statuses()]
    yield
    assert run_differences(before, all_rows(cluster)) == []
    statuses = cluster.statuses()
    assert [status.header.timeline for status in statuses] == timelines
    assert {status.state for status in statuses} == {shard_pb2.SERVING_STATE_SERVING}
    train(cluster)


def refusal(cluster: FaultCluster, name: str = NAME) -> tuple[str, str]:
    """Restores what cannot be; returns reason and message, whether the call or its job says so."""
    try:
        ended = cluster.checkpoints.failed(cluster.checkpoints.restore(name))
    except ShardamError as error:
        return error.reason, error.message
    return ended.reason, ended.problem


def flipped(data: bytes, place: int) -> bytes:
    """Returns data with one byte changed."""
    return data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_segment_is_named_and_nothing_is_restored(cluster: FaultCluster, damage: str) -> None:
    path = segment(cluster)
    data = path.read_bytes()
    content = {"flipped": flipped(data, len(data) // 2), "truncated": data[:-100], "missing": None}[damage]
    with untouched(cluster), changed(path, content):
        reason, message = refusal(cluster)
        assert reason == "CHECKPOINT_DAMAGED"
        assert path.name in message
        verified = cluster.checkpoints.failed(cluster.checkpoints.verify(NAME))
        assert path.name in verified.problem


def test_a_manifest_with_a_flipped_byte_is_named(cluster: FaultCluster) -> None:
    path = cluster.checkpoint_folder(NAME) / MANIFEST
    data = path.read_bytes()
    with untouched(cluster), changed(path, flipped(data, data.index(b"1"))):
        reason, message = refusal(cluster)
    assert reason == "CHECKPOINT_DAMAGED"
    assert str(path) in message


def test_a_checkpoint_without_manifest_is_incomplete_and_never_the_latest(cluster: FaultCluster) -> None:
    path = cluster.checkpoint_folder(NAME) / MANIFEST
    with untouched(cluster), changed(path, None):
        infos = {info.name: info for info in cluster.checkpoints.list()}
        assert not infos[NAME].complete
        assert infos[NAME].problem
        reason, message = refusal(cluster)
        assert reason == "CHECKPOINT_DAMAGED"
        assert MANIFEST in message
        assert refusal(cluster, "latest")[0] == "UNKNOWN_CHECKPOINT"


def test_a_segment_of_another_checkpoint_is_not_taken(cluster: FaultCluster) -> None:
    other = cluster.checkpoints.done(cluster.checkpoints.create("other"))
    path = segment(cluster)
    with untouched(cluster), changed(path, (cluster.checkpoint_folder(other.checkpoint) / path.name).read_bytes()):
        reason, message = refusal(cluster)
    cluster.checkpoints.delete("other")
    assert reason == "CHECKPOINT_DAMAGED"
    assert path.name in message


@pytest.mark.case("C081")
@pytest.mark.parametrize("name", ["../../etc", "/etc", "good/../../..", "../test2/good", "linked"])
def test_a_path_that_leads_outside_the_root_is_refused_with_the_root_and_the_flag(cluster: FaultCluster, name: str) -> None:
    link = cluster.checkpoint_folder("linked")
    if not link.is_symlink():
        outside = cluster.folder / "outside"
        outside.mkdir()
        link.symlink_to(outside)
    with untouched(cluster):
        reason, message = refusal(cluster, name)
    assert reason == "BAD_OPTION"
    assert str(link.parent.parent) in message
    assert "--checkpoint-dir" in message


def test_an_unknown_name_is_refused_with_what_there_is(cluster: FaultCluster) -> None:
    with untouched(cluster):
        reason, message = refusal(cluster, "gooood")
    assert reason == "UNKNOWN_CHECKPOINT"
    assert "gooood" in message


@pytest.mark.case("C082")
def test_two_requests_at_once_give_one_whole_checkpoint_or_a_refusal(cluster: FaultCluster) -> None:
    first = cluster.checkpoints.create("first")
    try:
        second = cluster.checkpoints.create("second")
    except ShardamError as error:
        assert error.reason == "CHECKPOINT_RUNNING"  # noqa: PT017 - the other way is fine, too
    else:
        cluster.checkpoints.done(second)
    cluster.checkpoints.done(first)
    for info in cluster.checkpoints.list():
        if info.complete:
            stored = read_checkpoint(cluster.checkpoint_folder(info.name))
            assert len(stored.shards) == NUM_SHARDS
    cluster.checkpoints.delete("first")
    with contextlib.suppress(ShardamError):
        cluster.checkpoints.delete("second")


# -- another cluster over the same root


def restore_with_tables(folder: Path, root: Path, *specs: TableSpec) -> tuple[str, str]:
    """Restores into a cluster that has tables of its own; returns reason and message."""
    with running_fault_cluster(folder, 1, checkpoint_dir=str(root)) as cluster:
        with raw_client(cluster.view()) as client:
            client.open()
            tables = client.create(*specs)
            client.push(1, tables[0], [5], [[1.0] * tables[0].spec.dim])
            before = client.read(tables[0], [5])
            reason, message = refusal(cluster)
            after = client.read(tables[0], [5])
            assert after.rows == before.rows
            client.push(2, tables[0], [5], [[1.0] * tables[0].spec.dim])
        return reason, message


@pytest.mark.case("C078")
@pytest.mark.parametrize("spec", [TableSpec("plain", 9), TableSpec("plain", 5, dtype="bfloat16")])
def test_another_dim_or_dtype_is_refused_with_both_schemas(cluster: FaultCluster, tmp_path: Path, spec: TableSpec) -> None:
    reason, message = restore_with_tables(tmp_path, cluster.state_folder / "checkpoints", spec, *TABLES[1:])
    assert reason == "SCHEMA_MISMATCH"
    assert "'plain'" in message
    assert message.index(str(TABLES[0])) < message.index(str(spec)), message


@pytest.mark.case("C069")
def test_a_renamed_table_is_refused_with_what_is_missing_and_what_is_not_expected(
    cluster: FaultCluster, tmp_path: Path
) -> None:
    reason, message = restore_with_tables(tmp_path, cluster.state_folder / "checkpoints", TableSpec("renamed", 5))
    assert reason == "CHECKPOINT_MISMATCH"
    assert "renamed" in message
    assert "plain" in message


# -- folders


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int, *, read_only: bool = False) -> Iterator[Path]:
    """Mounts a tmpfs."""
    folder.mkdir()
    options = f"size={size_bytes}" + (",ro" if read_only else "")
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, timeout=30, check=False
    )
    if result.returncode:
        pytest.skip("a tmpfs cannot be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)


SPARE_BYTES = 64 * 2**20
"""What a shard leaves free on a disk that it writes to."""

DISK_BYTES = SPARE_BYTES + 4 * 2**20


def test_a_full_disk_fails_the_checkpoint_with_the_folder_and_leaves_the_last_one(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", DISK_BYTES) as disk,
        running_fault_cluster(tmp_path, NUM_SHARDS, checkpoint_dir=str(disk)) as cluster,
    ):
        train(cluster)
        cluster.checkpoints.done(cluster.checkpoints.create(NAME))
        (disk / "filler").write_bytes(b"x" * (DISK_BYTES - used_bytes(disk) - SPARE_BYTES))
        with untouched(cluster):
            failed = cluster.checkpoints.failed(cluster.checkpoints.create("too-large"))
            assert failed.reason == "CHECKPOINT_FAILED"
            assert str(disk) in failed.problem
        status = cluster.statuses()[0]
        assert status.last_checkpoint.state == job_pb2.JOB_STATE_FAILED
        assert cluster.checkpoints.get("latest").name == NAME
        assert not cluster.checkpoint_folder("too-large").exists()
        (disk / "filler").unlink()
        cluster.checkpoints.done(cluster.checkpoints.create("small-enough"))
        cluster.checkpoints.done(cluster.checkpoints.restore(NAME))


def used_bytes(folder: Path) -> int:
    """Returns what the files of a tmpfs take, in whole pages."""
    page = 4096
    return sum(-(-path.stat().st_size // page) * page for path in folder.rglob("*") if path.is_file())


@pytest.mark.case("C074")
def test_a_read_only_checkpoint_folder_is_said_at_the_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES, read_only=True) as disk, running_valkey() as valkey:
        shards = Shards(valkey, tmp_path, 1)
        try:
            shard = shards.start(0, checkpoint_dir=str(disk), data_dir=str(tmp_path / "state"), journal="write")

            assert shard.process.wait(HANG_S / 2) > 0
            assert str(disk) in shard.log_text()
            assert "--checkpoint-dir" in shard.log_text()
        finally:
            shards.stop()


@pytest.mark.case("C074")
def test_a_shard_on_another_volume_is_named_and_the_manifest_says_who_wrote_where(tmp_path: Path) -> None:
    roots = [tmp_path / f"volume-{index}" for index in range(NUM_SHARDS)]
    for root in roots:
        root.mkdir()
    with running_fault_cluster(tmp_path, NUM_SHARDS, checkpoint_dir=str(roots[0])) as cluster:
        train(cluster)
        good = cluster.checkpoints.done(cluster.checkpoints.create(NAME))
        info: checkpoint_pb2.CheckpointInfo = cluster.checkpoints.get(good.checkpoint)
        assert [shard.folder for shard in info.shards] == [str(cluster.checkpoint_folder(NAME))] * NUM_SHARDS
        assert all(shard.host_name for shard in info.shards)
        cluster.flags["checkpoint_dir"] = str(roots[1])
        with cluster.held_down(1):
            pass
        wait_for("the shard to be started again", lambda: cluster.num_restarts == 1, HANG_S)
        cluster.wait_ready()
        cluster.flags["checkpoint_dir"] = str(roots[0])
        with untouched(cluster), pytest.raises(ShardamError, match=r"shards \[1\].*--checkpoint-dir"):
            cluster.checkpoints.done(cluster.checkpoints.create("torn"))
        assert cluster.checkpoints.get("latest").name == NAME
