"""Which checkpoints a cluster has, in a folder that all its shards see: ROOT/<cluster>/<checkpoint>/.

A checkpoint is what has a manifest; that comes last when one is made, and goes first when one is deleted. Blocking; used by one
thread at a time of home, and for reading by any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from shardam_proto.errors import BadOption, CheckpointFailed, ShardamError, UnknownCheckpoint
from shardam_proto.schema import NAME_PATTERN, check_name
from shardam_server.shard.checkpoints.file_names import MANIFEST, MANIFEST_BEING_WRITTEN, is_checkpoint_file
from shardam_server.shard.checkpoints.folders import check_sizes, folder_below, names_in, read_manifest, sync_folder
from shardam_server.shard.checkpoints.manifest import Manifest

LATEST = "latest"
"""Stands for the newest complete checkpoint; no checkpoint has this name."""

ROOT_ID = ".shardam-root-id"
"""File in the root folder with random digits: shards that read others there see another folder."""

_AUTOMATIC = re.compile(r"\d{8}T\d{6}-(\d{4,})")
"""Names made of the time and a number."""

_ROOT_ID_BYTES = 8
"""Random bytes that tell root folders apart."""


_LATER_S = 0.001
"""A checkpoint counts as made so long after another one that the clock says is from the future."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint's folder.

    Attributes:
        name: the folder's name.
        folder: the folder.
        manifest: what it holds; None: it cannot be told.
        problem: why it is not complete; empty: it is, as far as names and sizes of its files say.
        time_s: seconds since 1970 when it was cut, or else when the folder last changed.
    """

    name: str
    folder: Path
    manifest: Manifest | None
    problem: str
    time_s: float

    @property
    def complete(self) -> bool:
        """Whether all of it is there."""
        return not self.problem


class Catalogue:
    """The checkpoints of one cluster.

    Args:
        root: root folder of the checkpoints of all clusters.
        cluster: name of the cluster.

    Attributes:
        root: the same, absolute.
        folder: folder of this cluster's checkpoints.

    Raises:
        BadOption: the cluster's name is outside the alphabet.
    """

    def __init__(self, root: Path, cluster: str) -> None:
        self.root = root.absolute()
        self.folder = self.root / check_name(cluster, "cluster name")

    def prepare(self) -> str:
        """Makes the folders where they are missing, and tries to write there.

        Returns:
            The root folder's id: equal on all shards that see the same folder.

        Raises:
            CheckpointFailed: it cannot be used; says why and what to do.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".writable-{secrets.token_hex(_ROOT_ID_BYTES)}"
            probe.write_bytes(b"")
            probe.unlink()
            return self._root_id()
        except OSError as error:
            raise CheckpointFailed(
                f"the folder of checkpoints {self.folder} cannot be used ({error.strerror}: {error.filename}); make it "
                "writable for this process, or name another one with --checkpoint-dir",
                metadata={"folder": str(self.folder)},
            ) from error

    def _root_id(self) -> str:
        path = self.root / ROOT_ID
        if not path.exists():
            own = self.root / f"{ROOT_ID}-{secrets.token_hex(_ROOT_ID_BYTES)}"
            own.write_text(secrets.token_hex(_ROOT_ID_BYTES) + "\n", encoding="ascii")
            with contextlib.suppress(FileExistsError):  # another shard was first
                os.link(own, path)
            own.unlink()
        return path.read_text(encoding="ascii", errors="replace").strip()[: 2 * _ROOT_ID_BYTES]

    # -- questions

    def resolve(self, name: str) -> Path:
        """Returns the folder of a checkpoint.

        Args:
            name: its name in this cluster, "latest", or a path below the root folder.

        Raises:
            BadOption: it is no name, and leads out of the root folder.
            UnknownCheckpoint: there is no such folder.
        """
        if name == LATEST:
            latest = self.latest()
            if latest is None:
                raise UnknownCheckpoint(f"there is no complete checkpoint in {self.folder}", metadata={"name": name})
            return latest.folder
        folder = self.folder / name if NAME_PATTERN.fullmatch(name) else folder_below(self.root, name)
        folder_below(self.root, str(folder))  # a name may be a link
        if not folder.is_dir():
            raise UnknownCheckpoint(
                f"there is no checkpoint {name!r} in {self.folder}; `shardam checkpoint list` shows those that there are",
                metadata={"name": name},
            )
        return folder

    def relative(self, folder: Path) -> str:
        """Returns a checkpoint's folder relative to the root folder, as plans and shards name it."""
        return folder.resolve().relative_to(self.root.resolve()).as_posix()

    def read_relative(self, folder: str) -> tuple[Manifest, Path]:
        """Returns the manifest and the folder of what `relative` has named, which may look like a checkpoint's name.

        Raises:
            ShardamError: as read.
        """
        found = folder_below(self.root, folder)
        if not found.is_dir():
            raise UnknownCheckpoint(f"there is no folder {found}; put it back", metadata={"name": folder})
        return read_manifest(found), found

    def names(self) -> Sequence[str]:
        """Returns the names of this cluster's checkpoints, complete or not, in alphabetical order."""
        try:
            with os.scandir(self.folder) as found:
                return sorted(
                    one.name for one in found if one.is_dir(follow_symlinks=False) and NAME_PATTERN.fullmatch(one.name)
                )
        except FileNotFoundError:
            return []

    def list(self) -> Sequence[Entry]:
        """Returns this cluster's checkpoints, the newest first."""
        entries = [self._entry(name) for name in self.names()]
        return sorted(entries, key=lambda entry: (entry.time_s, entry.name), reverse=True)

    def latest(self) -> Entry | None:
        """Returns the newest complete checkpoint, or None."""
        return next((entry for entry in self.list() if entry.complete), None)

    def read(self, name: str) -> tuple[Manifest, Path]:
        """Returns a checkpoint's manifest and its folder.

        Args:
            name: as of resolve.

        Raises:
            BadOption, UnknownCheckpoint: as resolve.
            CheckpointDamaged: it is not complete, or its manifest is damaged; says what is missing.
            VersionMismatch: another shardam wrote it.
        """
        folder = self.resolve(name)
        return read_manifest(folder), folder

    def time_of_next(self, now_unix_s: float) -> float:
        """Returns when a checkpoint that is made now counts as made: after all there are, even if the clock was put back, so
        that it is the newest one.
        """
        known = [entry.time_s for entry in self.list() if entry.manifest is not None]
        return max([now_unix_s, *(time_s + _LATER_S for time_s in known)])

    def _entry(self, name: str) -> Entry:
        folder = self.folder / name
        manifest, problem = None, ""
        try:
            manifest = read_manifest(folder)
            if manifest.name != name:
                problem = f"{folder} has the manifest of {manifest.name!r}; give the folder its name back"
            check_sizes(manifest, folder)
        except ShardamError as error:
            problem = error.message
        time_s = manifest.created_unix_s if manifest is not None else _changed_unix_s(folder)
        return Entry(name, folder, manifest, problem, time_s)

    # -- changes

    def new_folder(self, name: str = "") -> Path:
        """Makes the folder of a new checkpoint; the folder's name is the checkpoint's.

        Args:
            name: its name; empty: made of the time and a number.

        Raises:
            BadOption: the name is taken, not allowed, or looks like one that is made by itself.
            CheckpointFailed: the folder cannot be made.
        """
        if name == LATEST or _AUTOMATIC.fullmatch(name):
            raise BadOption(
                f"{name!r} cannot be given to a checkpoint: 'latest' and names of the form YYYYMMDDThhmmss-NNNN have a meaning",
                metadata={"name": name},
            )
        folder = self.folder / (check_name(name, "checkpoint name") if name else self._automatic_name())
        try:
            folder.mkdir()
            sync_folder(self.folder)
        except FileExistsError as error:
            raise BadOption(
                f"there is a checkpoint {folder.name!r} in {self.folder} already; choose another name, or delete it first",
                metadata={"name": folder.name},
            ) from error
        except OSError as error:
            raise _failed(folder, "cannot be made", error) from error
        return folder

    def _automatic_name(self) -> str:
        numbers = [int(found[1]) for found in map(_AUTOMATIC.fullmatch, self.names()) if found]
        return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{max(numbers, default=0) + 1:04d}"

    def complete(self, manifest: Manifest) -> None:
        """Writes a checkpoint's manifest, which makes it one: on the disk when the call returns.

        Raises:
            CheckpointDamaged: a file of it is not there, as where a shard sees another folder; says which one.
            CheckpointFailed: it cannot be written, or is there already.
        """
        folder = self.folder / manifest.name
        check_sizes(manifest, folder)
        path, own = folder / MANIFEST, folder / MANIFEST_BEING_WRITTEN
        try:
            with open(own, "w", encoding="utf-8") as file:
                file.write(manifest.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.link(own, path)
            own.unlink()
            sync_folder(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                own.unlink()
            raise _failed(path, "cannot be written", error) from error

    def delete(self, name: str) -> None:
        """Deletes a checkpoint of this cluster, whatever is in its folder; the manifest first.

        Raises:
            UnknownCheckpoint: there is none of this name.
            BadOption: the folder has no manifest, and files that are not of a checkpoint: it may be anybody's, such as a
                shard's own where both kinds of folders lie in one.
            CheckpointFailed: it cannot be deleted.
        """
        if name not in self.names():
            raise UnknownCheckpoint(f"there is no checkpoint {name!r} in {self.folder}", metadata={"name": name})
        folder = self.folder / name
        if MANIFEST not in names_in(folder) and not _never_complete(folder):
            raise BadOption(
                f"{folder} is no checkpoint: it has no {MANIFEST}, and files that are not of a checkpoint; delete it by hand "
                "if nobody needs it",
                metadata={"name": name},
            )
        try:
            (folder / MANIFEST).unlink(missing_ok=True)
            sync_folder(folder)
            shutil.rmtree(folder)
        except OSError as error:
            raise _failed(folder, "cannot be deleted", error) from error

    def prune(self, keep: int, but: Collection[str] = ()) -> Sequence[str]:
        """Deletes complete checkpoints with names made by itself, but for the newest ones.

        Args:
            keep: how many stay; 0: all.
            but: names that stay, whatever a clock that went back makes of their order; they count among those that stay.

        Returns:
            Names of those deleted.

        Raises:
            CheckpointFailed: one cannot be deleted.
        """
        if not keep:
            return []
        names = [entry.name for entry in self.list() if entry.complete and _AUTOMATIC.fullmatch(entry.name)]
        others = [name for name in names if name not in but]
        too_many = others[max(0, keep - (len(names) - len(others))) :]
        for name in too_many:
            self.delete(name)
        return too_many

    def remove_incomplete(self, but: Collection[str] = ()) -> Sequence[str]:
        """Deletes folders that never became a checkpoint; one with files that are not of a checkpoint stays.

        Args:
            but: names that stay, because they are being written.

        Returns:
            Names of those deleted.

        Raises:
            CheckpointFailed: one cannot be deleted.
        """
        incomplete = [name for name in self.names() if name not in but and _never_complete(self.folder / name)]
        for name in incomplete:
            self.delete(name)
        return incomplete


def _never_complete(folder: Path) -> bool:
    names = list(names_in(folder))
    return MANIFEST not in names and all(map(is_checkpoint_file, names))


def _changed_unix_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _failed(path: Path, what: str, error: OSError) -> CheckpointFailed:
    return CheckpointFailed(
        f"{path} {what} ({error.strerror}); check the folder's permissions and free space, or name another one with "
        "--checkpoint-dir",
        metadata={"file": str(path)},
    )
