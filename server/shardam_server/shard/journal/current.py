"""CURRENT: which state a shard's folder holds, and in which files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Self

import xxhash

from shardam_proto.registry import ClusterEntry
from shardam_server.shard.journal.frames import ARITHMETIC_VERSION, FORMAT_VERSION, FileDamaged, check_versions

UNFINISHED = 0
"""Timeline of a state that was never whole; true ones count from 1."""


@dataclasses.dataclass(frozen=True)
class Current:
    """What a folder holds.

    Attributes:
        cluster_name: name of the cluster.
        cluster: the cluster.
        shard: index of the shard.
        lineage: lineage of the state.
        timeline: timeline of the state.
        epoch: highest route epoch that the shard has known.
        base: name of the base file, or None: the journal begins with the first change.
        first_file: number of the first journal file.
        complete: False: the state behind these files went on without them (CURRENT.incomplete).
        plan: the plan that the state came from, as Redis has it; empty: it began empty.
    """

    cluster_name: str
    cluster: ClusterEntry
    shard: int
    lineage: int
    timeline: int
    epoch: int
    base: str | None
    first_file: int
    complete: bool = True
    plan: str = ""

    @property
    def is_unfinished(self) -> bool:
        """True: it stands for a checkpoint that was to be taken over, and holds nothing of it yet."""
        return self.timeline == UNFINISHED

    def to_json(self) -> str:
        """Returns the file's content; `complete` stands in the file's name."""
        content: dict[str, object] = {"format": FORMAT_VERSION, "arithmetic": ARITHMETIC_VERSION, **dataclasses.asdict(self)}
        del content["complete"]
        if not self.plan:
            del content["plan"]
        return json.dumps({"checksum": _checksum(content), "content": content}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path, *, complete: bool) -> Self | None:
        """Reads the file; None: there is none.

        Raises:
            FileDamaged: it is not as it was written.
            VersionMismatch: another version of shardam wrote it.
        """
        try:
            outer = json.loads(path.read_bytes())
            content = outer["content"]
            checksum = outer["checksum"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FileDamaged(path, 0, f"it cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FileDamaged(path, 0, "it is not the JSON of a shard's CURRENT") from error
        if not isinstance(content, dict) or checksum != _checksum(content):
            raise FileDamaged(path, 0, "its checksum does not match its content")
        check_versions(path, content.pop("format"), content.pop("arithmetic"))
        return cls(**{**content, "cluster": ClusterEntry(**content["cluster"]), "complete": complete})


def _checksum(content: dict[str, object]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_64_hexdigest(canonical.encode())
