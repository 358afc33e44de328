"""What must hold of a cluster once its faults are over: each shard's bits are its journal's, and the books of all agree."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shardam_proto.errors import JournalDamaged
from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.comparison import RUN_FIELDS, differences
from shardam_testing.faults.live import read_rows, read_table
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.state_files import read_oracle
from shardam_testing.faults.workers import MAX_IN_FLIGHT, Worker
from shardam_testing.waiting import wait_for

SETTLE_TIMEOUT_S = 60.0
"""Home closes a silent client within a client lease and a few round trips."""


@dataclasses.dataclass
class Verified:
    """A cluster whose books and bits were compared.

    Attributes:
        oracles: one for each shard.
        num_comparisons: tables compared with their oracle, over all shards.
        mismatches: what differed.
    """

    oracles: list[Oracle]
    num_comparisons: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Checks that nothing differed.

        Raises:
            AssertionError: something did.
        """
        assert self.mismatches == [], "\n".join(self.mismatches)


def verify(cluster: FaultCluster) -> Verified:
    """Ends all faults, waits until every client that is gone is settled, and compares.

    Every worker and every member must have ended.
    """
    cluster.heal()
    cluster.wait_ready()
    gone = {worker.noted.client_id for worker in cluster.workers.started} - {b""}
    gone |= {life.client_id for member in cluster.members.started for life in member.noted.lives}
    settling = _Settling(cluster, gone)
    try:
        verified = Verified(wait_for("every client to be settled", settling.oracles, SETTLE_TIMEOUT_S))
    except AssertionError as error:
        raise AssertionError(f"{error}: {settling.problem}") from error
    _compare_bits(cluster, verified)
    _compare_steps(verified)
    for worker in cluster.workers.started:
        if not worker.replaced:
            _check_numbers(worker, verified)
    return verified


def read_oracles(cluster: FaultCluster) -> list[Oracle] | None:
    """Replays every shard's folder; None: a shard has changed meanwhile."""
    before = cluster.statuses()
    try:
        oracles = [read_oracle(Path(status.data_folder)) for status in before]
    except JournalDamaged:
        if [status.header.change_number for status in cluster.statuses()] == [status.header.change_number for status in before]:
            raise
        return None  # read while it was written
    expected = [status.header.change_number for status in before]
    return oracles if [oracle.change_number for oracle in oracles] == expected else None


def all_rows(cluster: FaultCluster) -> dict[str, TableRows]:
    """Returns the rows of every table over all shards."""
    return read_rows(cluster.view())


def run_differences(expected: dict[str, TableRows], got: dict[str, TableRows]) -> list[str]:
    """Compares two runs; one line for each field of a table that differs in any bit."""
    return [f"{name}.{line}" for name in expected for line in differences(expected[name], got[name], RUN_FIELDS)]


@dataclasses.dataclass
class _Settling:
    """Clients that are gone, until home has made their numbers equal on all shards."""

    cluster: FaultCluster
    gone: set[bytes]
    problem: str = ""

    def oracles(self) -> list[Oracle] | None:
        """Returns every shard's oracle, or None and says why not yet."""
        counts = [status.num_clients for status in self.cluster.statuses()]
        if any(counts):
            self.problem = f"open clients on the shards: {counts}"
            return None
        oracles = read_oracles(self.cluster)
        if oracles is None:
            self.problem = "the shards still change"
            return None
        home = oracles[0].clients
        left = [client_id.hex() for client_id in self.gone if client_id in home and not home[client_id].settled]
        self.problem = f"ended on home and not settled: {left}"
        return None if left else oracles


def _compare_bits(cluster: FaultCluster, verified: Verified) -> None:
    with cluster.clients() as clients:
        for index, (client, oracle) in enumerate(zip(clients, verified.oracles, strict=True)):
            for spec in TABLES:
                info = client.info(spec.name)
                expected, live = oracle.table(spec.name), read_table(client, info)
                found = differences(expected.rows(), live)
                if expected.step != info.table_step:
                    found.append(f"table_step: {expected.step} expected, {info.table_step} found")
                verified.num_comparisons += 1
                verified.mismatches += [f"shard {index}, table {spec.name}, {line}" for line in found]


def _compare_steps(verified: Verified) -> None:
    for spec in TABLES:
        steps = {oracle.table(spec.name).step for oracle in verified.oracles}
        if len(steps) > 1:
            verified.mismatches.append(f"table {spec.name} is at steps {sorted(steps)} on different shards")


def _check_numbers(worker: Worker, verified: Verified) -> None:
    """Checks that what was applied is what was acknowledged, and at most what a worker that is gone had in flight."""
    noted = worker.noted
    if not noted.client_id:
        return  # it was killed before it had connected
    last = {
        0 if noted.client_id not in oracle.clients else oracle.clients[noted.client_id].last_number
        for oracle in verified.oracles
    }
    if len(last) > 1:
        verified.mismatches.append(f"{worker.name}: its last number is {sorted(last)} on different shards")
    most = noted.sent if not noted.done else noted.acknowledged
    if min(last) < noted.acknowledged or max(last) > min(most, noted.acknowledged + MAX_IN_FLIGHT):
        verified.mismatches.append(
            f"{worker.name}: number {sorted(last)} is the last applied; acknowledged {noted.acknowledged}, sent {noted.sent}"
        )
