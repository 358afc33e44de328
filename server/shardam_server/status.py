"""`shardam status`: what Redis, shards and home say of cluster and workers, as tables or as JSON, and what is missing."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import sys

import redis

from shardam_proto.channels import call, open_channel
from shardam_proto.errors import ShardamError, ShardUnreachable, StaleState, WrongCluster
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, Keys, ShardEntry, connect_redis, read_cluster
from shardam_proto.v1 import common_pb2, shard_pb2, shard_pb2_grpc
from shardam_server.command_errors import CommandError
from shardam_server.redis_errors import redis_unreachable
from shardam_server.settings import StatusSettings
from shardam_server.shard_words import JOURNAL_MODES, JOURNAL_STATES, problem_of, state_word, warning_of
from shardam_server.status_checkpoints import NOT_ASKED, CheckpointsReport, ask_checkpoints
from shardam_server.status_workers import NO_HOME, WorkersReport, ask_workers
from shardam_server.terminal_text import aligned, bytes_words, duration_words

_MAX_CALLS = 32  # calls at once; more would only queue on this side
_REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """A shard as `status` sees it.

    Attributes:
        index: shard index.
        state: a word of shard_words.STATES, "restarting", "refused" (it answered, but not to this caller), "unreachable" or
            "missing".
        problem: why it does not take pulls and changes; empty if it does. The words of a refusal are the shard's own, other
            words follow the shard's name.
        entry: its registration, or None.
        status: its own answer, or None.
    """

    index: int
    state: str
    problem: str
    entry: ShardEntry | None = None
    status: shard_pb2.GetStatusResponse | None = None


@dataclasses.dataclass(frozen=True)
class ClusterReport:
    """A cluster as `status` sees it.

    Attributes:
        cluster: its name.
        view: what Redis says.
        shards: one report per configured shard.
        workers: what home says of the workers.
        checkpoints: what home says of the checkpoints.
    """

    cluster: str
    view: ClusterView
    shards: list[ShardReport]
    workers: WorkersReport = NO_HOME
    checkpoints: CheckpointsReport = NOT_ASKED

    def _refusals(self) -> list[str]:
        """Says each refusal once, whatever the number of shards: a wrong token is refused by all in the same words."""
        refused: dict[str, list[int]] = {}
        for shard in self.shards:
            if shard.state == _REFUSED:
                refused.setdefault(shard.problem, []).append(shard.index)
        return [
            f"{'shards' if len(indices) > 1 else 'shard'} {', '.join(map(str, indices))} refused to answer: {message}"
            for message, indices in refused.items()
        ]

    @property
    def problems(self) -> list[str]:
        """What is missing, one sentence each; empty: all is ready."""
        if self.view.entry is None:
            return [f"cluster {self.cluster!r} does not exist in this Redis: start shard 0, or name another with --cluster"]
        problems = [
            f"shard {shard.index} {shard.problem}" for shard in self.shards if shard.problem and shard.state != _REFUSED
        ]
        problems += self._refusals()
        if self.view.route_map is None:
            problems.append("there is no route map yet: it is made once all shards are registered")
        return problems

    @property
    def warnings(self) -> list[str]:
        """What an operator should know of shards that serve, one sentence each: a DEGRADED journal is said here."""
        found = [(shard.index, warning_of(shard.status)) for shard in self.shards if shard.status is not None]
        return [f"shard {index} {words}" for index, words in found if words is not None]


def run_status(settings: StatusSettings) -> int:
    """Prints the cluster's status; returns 0 if all shards take pulls and changes, else 1.

    Raises:
        RedisUnreachable: Redis does not answer.
    """
    report = read_report(settings)
    sys.stdout.write(report_as_json(report) if settings.as_json else report_as_text(report))
    return 1 if report.problems else 0


def read_report(settings: StatusSettings) -> ClusterReport:
    """Reads Redis and asks all shards at once.

    Raises:
        RedisUnreachable: Redis does not answer.
    """
    connection = connect_redis(settings.redis, settings.redis_timeout_s)
    try:
        connection.ping()
        view = read_cluster(connection, Keys(settings.cluster))
    except redis.RedisError as error:
        raise redis_unreachable(settings.redis, error) from error
    except ValueError as error:
        raise CommandError(f"cluster {settings.cluster!r} in Redis cannot be read: {error}") from error
    finally:
        connection.close()
    if view.entry is None:
        return ClusterReport(settings.cluster, view, [])
    cluster_id, num_shards = view.entry.cluster_id, view.entry.num_shards
    with concurrent.futures.ThreadPoolExecutor(min(num_shards, _MAX_CALLS)) as pool:
        pending = [pool.submit(_ask_shard, index, view.shards.get(index), cluster_id, settings) for index in range(num_shards)]
        shards = [future.result() for future in pending]
    return ClusterReport(settings.cluster, view, shards, *_ask_home(shards[0], cluster_id, settings))


def _ask_home(home: ShardReport, cluster_id: str, settings: StatusSettings) -> tuple[WorkersReport, CheckpointsReport]:
    """Asks home for workers and checkpoints if it has answered: one that is away costs one time-out and one message."""
    if home.entry is None or home.status is None:
        return NO_HOME, NOT_ASKED
    address, header = home.entry.address, _header(home.entry, cluster_id, settings)
    return ask_workers(address, header, settings), ask_checkpoints(address, header, home.status, settings)


def _header(entry: ShardEntry, cluster_id: str, settings: StatusSettings) -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(
        protocol_version=PROTOCOL_VERSION,
        cluster_id=cluster_id,
        incarnation=entry.incarnation,
        budget_s=settings.shard_timeout_s,
    )


def _ask_shard(index: int, entry: ShardEntry | None, cluster_id: str, settings: StatusSettings) -> ShardReport:
    if entry is None:
        return ShardReport(index, "missing", "is not registered: it is not running, or cannot reach this Redis")
    header = _header(entry, cluster_id, settings)
    peer = f"shard {index} at {entry.address}"
    with open_channel(entry.address) as channel:
        try:
            status = call(
                shard_pb2_grpc.ShardServiceStub(channel).GetStatus,
                shard_pb2.GetStatusRequest(header=header),
                timeout_s=settings.shard_timeout_s,
                token=settings.plain_token,
                peer=peer,
            )
        except WrongCluster:
            return ShardReport(index, "unreachable", f"is registered at {entry.address}, where another process answers", entry)
        except ShardUnreachable as error:
            return ShardReport(index, "unreachable", f"is registered but does not answer: {error.message}", entry)
        except StaleState:  # Redis names the process that was there before; the new one registers within moments
            return ShardReport(index, "restarting", "is restarting; try again", entry)
        except ShardamError as error:
            return ShardReport(index, _REFUSED, error.message, entry)
    problem = problem_of(index, status)
    return ShardReport(index, state_word(status), "" if problem is None else problem[1], entry, status)


def report_as_json(report: ClusterReport) -> str:
    """Returns one JSON object on one line, with a line break."""
    entry, route_map = report.view.entry, report.view.route_map
    value = {
        "cluster": report.cluster,
        "cluster_id": entry.cluster_id if entry else None,
        "num_shards": entry.num_shards if entry else None,
        "seed": str(entry.seed) if entry else None,  # 64 bits do not survive every JSON reader as a number
        "epoch": route_map.epoch if route_map else None,
        "ready": not report.problems,
        "problems": report.problems,
        "warnings": report.warnings,
        "shards": [_shard_as_json(shard) for shard in report.shards],
        **report.workers.to_json(),
        **report.checkpoints.to_json(),
    }
    return json.dumps(value) + "\n"


def _shard_as_json(shard: ShardReport) -> dict[str, object]:
    value: dict[str, object] = {"index": shard.index, "state": shard.state, "problem": shard.problem}
    if shard.entry is not None:
        value |= {"address": shard.entry.address, "http_address": shard.entry.http_address, "device": shard.entry.device}
        value |= {"pid": shard.entry.pid, "incarnation": str(shard.entry.incarnation)}
    if shard.status is not None:
        value |= {name: getattr(shard.status, name) for name in _STATUS_FIELDS}
        value |= {
            "journal_mode": JOURNAL_MODES.get(shard.status.journal_mode),
            "journal_state": JOURNAL_STATES.get(shard.status.journal_state),
            "journal_problem": shard.status.journal_problem or None,
            "data_folder": shard.status.data_folder or None,
            "checkpoint_problem": shard.status.checkpoint_problem or None,
        }
    return value


def report_as_text(report: ClusterReport) -> str:
    """Returns tables for a terminal, of shards and of workers, then what is missing."""
    entry, route_map = report.view.entry, report.view.route_map
    lines = []
    if entry is not None:
        epoch = "none yet" if route_map is None else str(route_map.epoch)
        lines = [
            f"cluster {report.cluster}   id {entry.cluster_id}   seed {entry.seed}   epoch {epoch}   {_tables(report)}",
            "",
        ]
        lines += aligned([_HEADINGS, *(_row(shard) for shard in report.shards)])
        kept = [_kept(shard.index, shard.status) for shard in report.shards if shard.status is not None]
        lines += ["", *aligned(kept), ""] if kept else [""]
        lines += [*aligned(report.workers.table()), *report.workers.notes(), ""]
        lines += [*report.checkpoints.lines(), ""]
        lines += [f"note: {warning}" for warning in report.warnings]
    lines += [f"missing: {problem}" for problem in report.problems] or ["all shards are ready"]
    return "\n".join(lines) + "\n"


_STATUS_FIELDS = (
    "version",
    "host_name",
    "uptime_s",
    "num_tables",
    "num_rows",
    "max_rows",
    "record_bytes",
    "index_bytes",
    "resident_bytes",
    "device_memory_bytes",
    "queue_depth",
    "queue_bytes",
    "reserved_bytes",
    "parked_requests",
    "num_clients",
    "journal_bytes",
    "pre_image_bytes",
)
"""Fields of GetStatusResponse that the JSON form hands on."""

_HEADINGS = ("shard", "state", "address", "device", "rows", "memory", "gpu", "uptime", "pid", "queue", "clients")


def _row(shard: ShardReport) -> tuple[str, ...]:
    entry, status = shard.entry, shard.status
    known = ("-", "-") if entry is None else (entry.address, entry.device)
    pid = "-" if entry is None else str(entry.pid)
    if status is None:
        return (str(shard.index), shard.state, *known, "-", "-", "-", "-", pid, "-", "-")
    on_device = bytes_words(status.device_memory_bytes) if status.device_memory_bytes else "-"
    numbers = (str(status.num_rows), bytes_words(status.resident_bytes), on_device, duration_words(status.uptime_s))
    return (str(shard.index), shard.state, *known, *numbers, pid, str(status.queue_depth), str(status.num_clients))


def _tables(report: ClusterReport) -> str:
    counts = {shard.status.num_tables for shard in report.shards if shard.status is not None}
    return f"tables {max(counts)}" if counts else "tables unknown"


def _kept(index: int, status: shard_pb2.GetStatusResponse) -> tuple[str, ...]:
    """Returns how a shard keeps its changes, and what waits in it, as cells of one line."""
    mode = JOURNAL_MODES.get(status.journal_mode, "unknown")
    state = JOURNAL_STATES.get(status.journal_state, "unknown")
    return (
        f"shard {index}",
        f"journal {mode}" + ("" if state in ("ok", "unknown") else f" ({state.upper()})"),
        f"{bytes_words(status.journal_bytes)} since its base",
        status.data_folder or "memory only",
        f"waiting {bytes_words(status.queue_bytes)}",
        f"reserved {bytes_words(status.reserved_bytes)}",
        f"parked {status.parked_requests}",
    )
