"""What `up` says once everything is ready: as text for a person, or as one JSON line for a program."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from shardam_proto.registry import ShardEntry
from shardam_server.data_folder import describe_durability


@dataclasses.dataclass(frozen=True)
class Banner:
    """A cluster that is ready.

    Attributes:
        cluster: its name.
        redis_url: URL with the password; the terminal or the parent process that started `up` is to have it.
        private_redis: True: `up` started that server itself.
        admin_url: URL of the admin API.
        shards: the shards, by index.
        requires_token: True: workers need SHARDAM_TOKEN.
        data_dir: folder that keeps the shards' state; None: memory only.
        journal: how they keep changes: off, write or fsync.
        checkpoints: where checkpoints lie, and when the cluster makes them, in words; None: there are none.
    """

    cluster: str
    redis_url: str
    private_redis: bool
    admin_url: str
    shards: list[ShardEntry]
    requires_token: bool
    data_dir: Path | None
    journal: str
    checkpoints: str | None = None

    def as_json(self) -> str:
        """Returns one JSON line: redis_url, cluster, admin_url, data_dir, journal, shards (index, address, http_address, pid).

        `data_dir` is null if rows live in memory only.
        """
        shards = [
            {"index": shard.index, "address": shard.address, "http_address": shard.http_address, "pid": shard.pid}
            for shard in self.shards
        ]
        values = {
            "redis_url": self.redis_url,
            "cluster": self.cluster,
            "admin_url": self.admin_url,
            "data_dir": None if self.data_dir is None else str(self.data_dir),
            "journal": self.journal,
            "shards": shards,
        }
        return json.dumps(values)

    def as_text(self) -> str:
        """Returns lines for a terminal."""
        name = "" if self.cluster == "default" else f"cluster={self.cluster!r}"
        lines = [
            "",
            f"shardam: cluster {self.cluster!r} is ready",
            *(f"  shard {shard.index}   {shard.address}   device {shard.device}   pid {shard.pid}" for shard in self.shards),
            f"  admin     {self.admin_url}   (rows and moments: {self.admin_url}/docs)",
            "",
            "In the workers' shell:",
            f"  export SHARDAM_REDIS_URL={self.redis_url}",
            *(["  export SHARDAM_TOKEN=...   (the token of this cluster)"] if self.requires_token else []),
            "In Python:",
            "  import shardam",
            f"  cluster = shardam.connect({name})",
            "",
            describe_durability(self.data_dir, self.journal),
            *([] if self.checkpoints is None else [self.checkpoints]),
            *(["The private Redis is for this machine; workers elsewhere need --redis."] if self.private_redis else []),
            "Stop with Ctrl-C (drains; a second Ctrl-C kills).",
            "",
        ]
        return "\n".join(lines)
