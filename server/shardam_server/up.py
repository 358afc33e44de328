"""`shardam up`: one machine's cluster as child processes: a private Valkey (or `--redis`), shards and the admin API."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys

from shardam_proto.errors import RedisUnreachable
from shardam_proto.registry import ShardEntry, lost_shard_problem
from shardam_server.banner import Banner
from shardam_server.bind import check_bind, check_port_free, free_port, join_address, local_host
from shardam_server.child_commands import ChildCommands
from shardam_server.children import Child, Console
from shardam_server.command_errors import CommandError, UsageError
from shardam_server.data_folder import check_not_held, describe_checkpoints, prepare_data_dir
from shardam_server.devices import choose_device
from shardam_server.lifeline import watch_stdin
from shardam_server.logs import configure_logging, secrets_of
from shardam_server.private_redis import PrivateRedis
from shardam_server.readiness import ClusterProbe
from shardam_server.settings import UpSettings
from shardam_server.supervisor import Group, Kept, RestartPolicy, Supervisor
from shardam_server.up_restore import StartRestore
from shardam_server.up_shards import ShardTerms, UpShards

_log = logging.getLogger(__name__)

_DRAIN_MARGIN_S = 5.0  # a child has drain_s for what it has accepted, and this for the rest of its end


def run_up(settings: UpSettings) -> int:
    """Starts the cluster and supervises it until it is told to stop.

    Returns:
        Exit status: 0 after a drain, 1 if something had to be killed.

    Raises:
        UsageError: the bind is refused, the data folder cannot be written, or a child cannot run with its settings.
        CommandError: a port is taken, the data folder is in use, there is no Redis, or a child does not come up.
        RedisUnreachable: the Redis that `--redis` names does not answer.
    """
    check_bind(settings.host, has_token=settings.token is not None, insecure=settings.insecure)
    for index in range(settings.shards if settings.port else 0):
        check_port_free(settings.host, settings.port + index, "--port")
    check_port_free(settings.host, settings.admin_port, "--admin-port")
    private = PrivateRedis.prepare() if settings.redis is None else None
    if settings.data_dir is not None:
        prepare_data_dir(settings.data_dir)
        check_not_held(settings.data_dir, settings.cluster)
    configure_logging(settings, role="up")
    if private is not None and os.environ.get("SHARDAM_REDIS_URL"):
        _log.info("SHARDAM_REDIS_URL is for workers and not used here: a private Redis is started; choose another with --redis")
    choice = choose_device(settings.device, index=0)  # refuses a GPU that is not there before anything starts
    if choice.reason:
        _log.info("%s", choice.reason)
    return asyncio.run(_Cluster(settings, private).run())


class _Cluster:
    """The children of one `up`. Made in the event loop's thread, before the loop runs."""

    def __init__(self, settings: UpSettings, private: PrivateRedis | None) -> None:
        self._settings = settings
        self._private = private
        self._redis_url = private.url if private is not None else str(settings.redis)
        self._probe = ClusterProbe(self._redis_url, settings.cluster, settings.redis_timeout_s)
        self._admin_port = settings.admin_port
        self._admin_has_served = False
        self._announced = False

    async def run(self) -> int:
        """Runs until stopped; returns the exit status."""
        try:
            if self._private is None:
                await self._probe.check_redis()
            supervisor = Supervisor(self._make_groups(), self._settings.drain_s + _DRAIN_MARGIN_S)
            self._listen_for_stop(supervisor)
            orderly = await supervisor.run(self._announce)
        finally:
            self._probe.close()
            if self._private is not None:
                self._private.remove_directory()
        return 0 if orderly else 1

    def _listen_for_stop(self, supervisor: Supervisor) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means what it says
                loop.add_signal_handler(number, supervisor.request_stop, number.name)
        if self._settings.exit_with_stdin:

            def stdin_ended() -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    loop.call_soon_threadsafe(supervisor.request_stop, "stdin ended")

            watch_stdin(stdin_ended)

    def _make_groups(self) -> list[Group]:
        """Makes the children in the order in which they start; they stop in the opposite one."""
        settings, private = self._settings, self._private
        policy = RestartPolicy(settings.restart_delay_s, settings.restart_delay_max_s, settings.restart_limit)
        of_ours = dataclasses.replace(policy, final_status=UsageError.exit_code)
        secrets = [*secrets_of(settings), private.password if private is not None else ""]
        console = Console(sys.stderr, settings.log_format, secrets)
        commands = ChildCommands(settings, self._redis_url)
        servers: list[Kept] = []
        if private is not None:
            loss = "names and table schemas were in its memory; shards register again by themselves"
            servers = [Kept(Child(commands.redis(private), console), self._redis_ready, policy, aftermath=loss)]
        terms = ShardTerms(settings, commands, console, self._probe, of_ours, servers)
        shards = UpShards(terms, self._report_lost, lambda: self._admin_port)
        admin = Kept(Child(commands.admin(self._port_of_admin), console), self._admin_ready, of_ours, after=servers)
        replaceable = Group(
            shards.make(),
            replace=shards.replace,
            drain_s=settings.drain_s + _DRAIN_MARGIN_S,
            when_replaced=self._announce_shards,
        )
        return [*([Group(servers)] if servers else []), replaceable, Group([admin])]

    def _port_of_admin(self) -> int:
        """Returns the admin API's port; a free one is chosen as late as possible, since a shard may take it meanwhile."""
        if not self._settings.admin_port and not self._admin_has_served:
            self._admin_port = free_port(self._settings.host)
        return self._admin_port

    async def _redis_ready(self, pid: int) -> None:
        await self._probe.redis_ready()
        if self._private is not None:
            self._private.remove_directory()
        _log.debug("the private Redis answers (pid %d)", pid)

    def _report_lost(self, entry: ShardEntry) -> None:
        """Says once that a shard is LOST, with the remedy.

        Raises:
            CommandError: the remedy needs the URL of the private Redis, which only a banner in text would say.
        """
        settings, problem = self._settings, lost_shard_problem(entry.index)
        if self._announced or self._private is None:
            _log.warning("%s; until then it is not ready (pid %d)", problem, entry.pid)
        elif settings.as_json:
            raise CommandError(f"{problem}: for that start `shardam up` with this folder and without --json")
        else:
            _log.warning("%s; until then the cluster is not ready (pid %d)", problem, entry.pid)
            cluster = "" if settings.cluster == "default" else f" --cluster {settings.cluster}"
            sys.stdout.write(
                f"\nShard {entry.index} is LOST, and the cluster waits for it. To give its rows up, in another shell:\n"
                f"  export SHARDAM_REDIS_URL={self._redis_url}\n  shardam forget-shard --index {entry.index}{cluster}\n\n"
            )
            sys.stdout.flush()

    async def _admin_ready(self, pid: int) -> None:
        await self._probe.admin_ready(local_host(self._settings.host), self._admin_port)
        self._admin_has_served = True
        _log.debug("the admin API answers (pid %d)", pid)

    async def _announce(self) -> None:
        if self._settings.restore is not None:
            await StartRestore(self._probe, self._settings.restore, self._settings.plain_token).run()
        view = await self._probe.view()
        settings = self._settings
        banner = Banner(
            cluster=settings.cluster,
            redis_url=self._redis_url,
            private_redis=self._private is not None,
            admin_url=f"http://{join_address(local_host(settings.host), self._admin_port)}",
            shards=[view.shards[index] for index in sorted(view.shards)],
            requires_token=settings.token is not None,
            data_dir=settings.data_dir,
            journal=settings.journal_mode,
            checkpoints=describe_checkpoints(settings.checkpoint_root, settings.checkpoint_every_s, settings.checkpoint_keep),
        )
        self._announced = True
        sys.stdout.write((banner.as_json() if settings.as_json else banner.as_text()) + "\n")
        sys.stdout.flush()

    async def _announce_shards(self) -> None:
        """Says that all shards serve that the cluster has moved to."""
        if not self._announced:
            return  # the banner will name them
        with contextlib.suppress(RedisUnreachable):
            shards = (await self._probe.view()).shards
            _log.info("all %d shards serve", len(shards))
            if not self._settings.as_json:  # there stdout is the one line
                named = "".join(
                    f"  shard {index}   {shard.address}   device {shard.device}   pid {shard.pid}\n"
                    for index, shard in sorted(shards.items())
                )
                sys.stdout.write(f"\nshardam: cluster {self._settings.cluster!r} is ready on {len(shards)} shards\n{named}")
                sys.stdout.flush()
