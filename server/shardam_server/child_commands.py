"""How `up` tells its shards and its admin API what they are: flags for settings, the environment for secrets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from shardam_server.children import ChildSpec
from shardam_server.private_redis import PrivateRedis
from shardam_server.setting_types import ENV_PREFIX, LIFELINE_VARIABLE
from shardam_server.settings import CommonSettings, StateSettings, UpSettings

_ONE_SHARD_ONLY = frozenset({"INDEX", "HTTP_PORT", "ADVERTISE"})
"""A value of these in the environment would be wrong for all shards but one."""

_SHARD_STATE = frozenset(StateSettings.model_fields) - frozenset(CommonSettings.model_fields) - {"truncate_journal"}
"""Settings that a shard gets as they are; journals are truncated at a first start only."""

_OF_A_JOURNAL = frozenset({"on_journal_full", "journal_limit_mib"})
"""Settings that a shard without a folder refuses."""

_NOT_HANDED_ON = frozenset({*map(str.upper, UpSettings.model_fields), *_ONE_SHARD_ONLY, "REDIS_URL", "JSON"})


class ChildCommands:
    """Makes the specifications of the children of one `up`.

    Args:
        settings: settings of `up`.
        redis_url: where the cluster meets.
    """

    def __init__(self, settings: UpSettings, redis_url: str) -> None:
        self._settings = settings
        self._redis_url = redis_url

    def redis(self, private: PrivateRedis) -> ChildSpec:
        """Returns the private server's specification."""
        return ChildSpec(
            name="redis",
            command=private.command,
            environment=os.environ,
            stdin=private.configuration,
            # It never saves, so that the kernel's overcommit setting does not matter.
            hidden_lines=("Memory overcommit must be enabled", "Reading config from stdin"),
        )

    def shard(
        self, index: int, port: Callable[[], int], has_served: Callable[[], bool], num_shards: int | None = None
    ) -> ChildSpec:
        """Returns a shard's specification.

        Args:
            index: index of the shard.
            port: returns its port, asked anew for each start; 0: any.
            has_served: returns whether it was ready once. From then on no start truncates a journal: the user has seen what
                one truncation costs, and not what a later one would.
            num_shards: shards of the cluster; None: as many as `up` was told.
        """
        count = self._settings.shards if num_shards is None else num_shards

        def flags() -> list[str]:
            truncate = self._settings.truncate_journal and not has_served()
            return [*self._shard_flags(index, count, port()), *(["--truncate-journal"] if truncate else [])]

        return self._package(f"shard {index}", flags)

    def admin(self, port: Callable[[], int]) -> ChildSpec:
        """Returns the admin API's specification.

        Args:
            port: its port at each start.
        """
        return self._package("admin", lambda: ["admin", *_flags({"port": port()}), *self._common_flags()])

    def _package(self, name: str, arguments: Callable[[], Sequence[str]]) -> ChildSpec:
        # -P: a file of the user's folder, such as redis.py, must not stand in for a package.
        program = [sys.executable, "-P", "-m", "shardam_server"]
        return ChildSpec(name, lambda: [*program, *arguments()], self._environment())

    def _environment(self) -> dict[str, str]:
        """Returns this process's environment without its settings, which the children get as flags, and with the secrets."""
        hidden = {ENV_PREFIX + name for name in _NOT_HANDED_ON}
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment["SHARDAM_REDIS"] = self._redis_url
        environment[LIFELINE_VARIABLE] = "stdin"
        if self._settings.plain_token is not None:
            environment["SHARDAM_TOKEN"] = self._settings.plain_token
        return environment

    def _common_flags(self) -> list[str]:
        settings = self._settings
        flags = _flags(
            {
                "cluster": settings.cluster,
                "host": settings.host,
                "drain-s": settings.drain_s,
                "redis-timeout-s": settings.redis_timeout_s,
                "log-level": settings.log_level,
                "log-format": settings.log_format,
            }
        )
        return [*flags, "--insecure"] if settings.insecure else flags

    def _state(self) -> dict[str, object]:
        """Returns the settings of a shard's state, sorted by name; one without a value is left to the shard."""
        data_dir = self._settings.data_dir or "none"
        names = _SHARD_STATE if self._settings.data_dir is not None else _SHARD_STATE - _OF_A_JOURNAL
        values = {name: getattr(self._settings, name) for name in sorted(names)}
        return {"data_dir": data_dir, **{name: value for name, value in values.items() if value is not None}}

    def _shard_flags(self, index: int, num_shards: int, port: int) -> list[str]:
        settings = self._settings
        flags = _flags(
            {
                "index": index,
                "shards": num_shards,
                "port": port,
                "device": settings.device,
                "max-rows": settings.max_rows,
                "threads": settings.threads,
                "lease-s": settings.lease_s,
            }
        )
        flags += _flags({name.replace("_", "-"): value for name, value in self._state().items()})
        if "seed" in settings.model_fields_set:  # unsaid, a shard takes the seed that the cluster was created with
            flags += _flags({"seed": settings.seed})
        return ["shard", *flags, *self._common_flags()]


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]
