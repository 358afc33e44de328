"""Bounded staleness on one shard: pulls wait for members that are too far behind, pushes never do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardam_testing.held_group import HeldGroup, assign_request, parked, pull_of, reason_of, refused
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import RawClient
from shardam_testing.raw_stream import RawStream, raw_stream

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2
from shardam_server.shard.groups.values import GroupTerms


@dataclasses.dataclass
class Worker:
    """One member with its stream, and a table that it alone pushes to: its step is the member's clock.

    Attributes:
        clock: its clock, once what it sent is applied.
        number: its last number.
    """

    client: RawClient
    stream: RawStream
    rank: int
    table: common_pb2.TableInfo
    clock: int = 0
    number: int = 0

    def push(self) -> int:
        """Sends a push and returns its request id."""
        self.clock, self.number = self.clock + 1, self.number + 1
        return self.stream.send(
            self.client.push_request(self.number, self.table, [1], [[1, 1]], step=self.clock, rank=self.rank)
        )

    def close(self, kind: embedding_pb2.CloseKind.ValueType) -> int:
        """Sends the end of a push that is not applied here."""
        self.clock, self.number = self.clock + 1, self.number + 1
        header = self.client.header(self.number, step=self.clock, rank=self.rank)
        table_ids = [self.table.table_id] if kind == embedding_pb2.CLOSE_KIND_VOID else []
        return self.stream.send(embedding_pb2.CloseNumberRequest(header=header, kind=kind, table_ids=table_ids))

    def assign(self) -> int:
        """Sends a row change, which is no step."""
        self.number += 1
        return self.stream.send(assign_request(self.client, self.number, self.table))

    def pull(self, tables: list[common_pb2.TableInfo], **changes: float) -> int:
        """Sends a training pull of several tables and returns its request id."""
        return self.stream.send(pull_of(self.client, tables, [1], step=self.clock + 1, rank=self.rank, **changes))


@dataclasses.dataclass
class Workers:
    """The members of one bounded group."""

    shard: HeldShard
    group: HeldGroup
    workers: list[Worker]

    @property
    def tables(self) -> list[common_pb2.TableInfo]:
        return [worker.table for worker in self.workers]

    def staleness(self) -> dict[str, float]:
        """Returns the buckets of the histogram and its count."""
        found = {}
        for line in self.shard.shard.metrics.text().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("shardam_pull_staleness_steps_bucket"):
                found[name.partition('le="')[2].partition('"')[0]] = float(value)
            elif name.startswith("shardam_pull_staleness_steps_count"):
                found["count"] = float(value)
        return found


@contextlib.contextmanager
def bounded(max_staleness: int, count: int = 2, world_size: int = 0) -> Iterator[Workers]:
    """Runs a shard with a group of so many members."""
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(held_shard())
        clients = [stack.enter_context(shard.client()) for _ in range(count)]
        workers = [
            Worker(client, stack.enter_context(raw_stream(client.channel)), rank, shard.install())
            for rank, client in enumerate(clients)
        ]
        terms = GroupTerms("bounded", world_size or count, max_staleness)
        yield Workers(shard, HeldGroup(shard, terms, clients), workers)


OPERATIONS = ("push", "void", "assign", "pull")


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@settings(max_examples=20, deadline=None)
@given(schedule=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(OPERATIONS), st.integers(1, 6)), max_size=25))
def test_no_pull_saw_more_than_the_bound_in_any_schedule(max_staleness: int, schedule: list[tuple[int, str, int]]) -> None:
    with bounded(max_staleness, count=3) as group:
        pulls: list[tuple[Worker, int, int]] = []
        changes: list[tuple[Worker, int]] = []
        for rank, operation, count in schedule:
            worker = group.workers[rank]
            match operation:
                case "push":
                    changes += [(worker, worker.push()) for _ in range(count)]
                case "void":
                    changes.append((worker, worker.close(embedding_pb2.CLOSE_KIND_VOID)))
                case "assign":
                    changes.append((worker, worker.assign()))
                case _:
                    pulls.append((worker, worker.clock, worker.pull(group.tables)))
        last = max(worker.clock for worker in group.workers)
        for worker in group.workers:
            changes += [(worker, worker.push()) for _ in range(last - worker.clock)]
        for worker, request_id in changes:
            worker.stream.answer(request_id)  # nothing refuses a change
        for worker, clock, request_id in pulls:
            seen = [step.table_step for step in worker.stream.answer(request_id).pull.steps]
            others = [step for rank, step in enumerate(seen) if rank != worker.rank]
            assert min(others) >= clock - max_staleness
            assert seen[worker.rank] >= clock  # and the changes before it on its stream
        staleness = group.staleness()
        assert staleness["count"] == len(pulls)
        assert staleness[f"{max_staleness:.1f}"] == len(pulls)
        assert group.shard.shard.streams.parking.num_parked == 0


@pytest.mark.case("C056")
def test_a_fast_worker_waits_for_one_that_sleeps_whose_late_push_is_still_taken_and_a_histogram_shows_it() -> None:
    with bounded(4) as group:
        fast, slow = group.workers
        slow.stream.answer(slow.pull(group.tables))
        for step in range(5):
            assert fast.stream.answer(fast.pull(group.tables)).pull.steps[1].table_step == 0
            assert fast.stream.answer(fast.push()).push.steps[0].table_step == step + 1
        waiting = fast.pull(group.tables)
        parked(fast.client, 1)
        for _ in range(494):  # what is pushed without a pull in between is not held up
            fast.push()
        # Its answer is waited for, as the other worker's push comes on a stream of its own and could be taken before these.
        assert fast.stream.answer(fast.push()).push.steps[0].table_step == 500
        assert not fast.stream.answers.get(waiting)
        assert slow.stream.answer(slow.push()).push.steps[0].table_step == 1
        assert fast.stream.answer(fast.push()).push.steps[0].table_step == 501
        parked(fast.client, 1)
        staleness = group.staleness()
        assert [staleness[bucket] for bucket in ("0.0", "1.0", "2.0", "4.0", "count")] == [2, 3, 4, 6, 6]
        for _ in range(496):
            slow.push()
        assert fast.stream.answer(waiting).pull.steps[1].table_step >= 497
        assert group.staleness()["4.0"] == group.staleness()["count"] == 7


@pytest.mark.parametrize("release", ["push", "skip", "void"])
def test_a_pull_waits_until_the_slowest_member_has_made_a_step_of_any_kind(release: str) -> None:
    with bounded(0) as group:
        fast, slow = group.workers
        fast.push()
        waiting = fast.pull(group.tables)
        slow.assign()  # no step
        assert slow.stream.answer(slow.pull(group.tables)).pull.rows
        evaluation = fast.stream.ask(pull_of(fast.client, group.tables, [1]))  # no step: never waits
        assert evaluation.pull.steps[0].table_step == 1
        parked(fast.client, 1)
        if release == "push":
            slow.push()
        else:
            slow.close(embedding_pb2.CLOSE_KIND_SKIP if release == "skip" else embedding_pb2.CLOSE_KIND_VOID)
        assert fast.stream.answer(waiting).pull.rows


def test_a_member_that_is_gone_holds_nobody_up() -> None:
    with bounded(1) as group:
        fast, slow = group.workers
        for _ in range(3):
            fast.push()
        waiting = fast.pull(group.tables)
        parked(fast.client, 1)
        group.group.leave(slow.client)
        assert fast.stream.answer(waiting).pull.rows


def test_ranks_that_are_still_to_come_are_waited_for_from_the_start_and_one_that_joins_late_begins_where_it_joins() -> None:
    with bounded(1, count=2, world_size=3) as group:
        one, two = group.workers
        for worker in (one, two):
            worker.push()
            assert worker.stream.answer(worker.pull(group.tables)).pull.rows
            worker.push()
        waiting = one.pull(group.tables)
        parked(one.client, 1)
        with group.shard.client() as late:
            group.group.join(late, first_step=2)
            assert one.stream.answer(waiting).pull.rows
            one.push()
            waiting = one.pull(group.tables)  # at 3; the new one is at 1, another at 2
            two.push()
            parked(one.client, 1)
            late.push(1, group.tables[0], [1], [[1, 1]], step=2, rank=2)
            assert one.stream.answer(waiting).pull.rows


def test_two_workers_that_prefetch_one_batch_never_block_each_other() -> None:
    with bounded(0) as group:
        pulls = {worker.rank: [worker.pull(group.tables), worker.pull(group.tables)] for worker in group.workers}
        for step in range(1, 30):
            for worker in group.workers:
                answer = worker.stream.answer(pulls[worker.rank].pop(0)).pull
                assert answer.steps[1 - worker.rank].table_step >= step - 2
                worker.push()
                pulls[worker.rank].append(worker.pull(group.tables))


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_push_whose_step_is_not_the_next_one_is_refused_and_its_number_stays_free(step: int) -> None:
    with bounded(0) as group:
        worker = group.workers[0]
        worker.stream.answer(worker.push())
        client = worker.client
        push = client.push_request(2, worker.table, [1], [[1, 1]], step=step)
        with pytest.raises(ShardamError, match=f"next push is step 2; this one says {step}") as error:
            worker.stream.ask(push)
        assert (error.value.reason, error.value.metadata["clock"]) == ("GROUP_MISMATCH", "1")
        if step:
            header = client.header(2, step=step)
            skip = embedding_pb2.CloseNumberRequest(header=header, kind=embedding_pb2.CLOSE_KIND_SKIP)
            assert refused(worker.stream, skip) == "GROUP_MISMATCH"
        assert worker.stream.answer(worker.push()).push.steps[0].table_step == 2


def test_a_repeat_gets_the_former_answer_and_with_another_step_is_refused() -> None:
    with bounded(0) as group:
        worker = group.workers[0]
        worker.stream.answer(worker.push())
        request = worker.client.push_request(1, worker.table, [1], [[1, 1]], step=1)
        assert worker.stream.ask(request).push.repeated_number
        request = worker.client.push_request(1, worker.table, [1], [[1, 1]], step=2)
        assert refused(worker.stream, request) == "SEQUENCE_REUSED"
        request = worker.client.push_request(2, worker.table, [1], [[1, 1]], step=2)
        request.contribution = group_pb2.CONTRIBUTION_KIND_GRADIENT
        assert refused(worker.stream, request) == "BAD_OPTION"


def test_a_closed_row_change_is_no_step_and_row_changes_name_none() -> None:
    with bounded(0) as group:
        worker = group.workers[0]
        named = assign_request(worker.client, 1, worker.table, step=1)
        assert refused(worker.stream, named) == "GROUP_MISMATCH"
        skip = embedding_pb2.CloseNumberRequest(header=worker.client.header(1), kind=embedding_pb2.CLOSE_KIND_SKIP)
        worker.stream.ask(skip)
        worker.number = 1
        assert worker.stream.answer(worker.push()).push.steps[0].table_step == 1


def test_a_unary_pull_that_would_wait_is_refused_to_be_asked_again_and_others_are_counted() -> None:
    with bounded(0) as group:
        fast, slow = group.workers
        fast.stream.answer(fast.push())
        request = pull_of(fast.client, group.tables, [1], step=2)
        assert reason_of(lambda: fast.client.call(fast.client.embedding.Pull, request)) == "NOT_READY"
        slow.stream.answer(slow.push())
        assert fast.client.call(fast.client.embedding.Pull, request).rows
        assert group.staleness()["count"] == 1


def test_a_pull_that_waits_beyond_its_budget_is_refused_and_counted_nowhere() -> None:
    with bounded(0) as group:
        fast = group.workers[0]
        fast.push()
        waiting = fast.pull(group.tables, budget_s=0.05)
        assert reason_of(lambda: fast.stream.answer(waiting)) == "SHARD_UNREACHABLE"
        assert (group.staleness()["count"], fast.client.status().parked_requests) == (0, 0)


def test_a_dropped_client_that_waits_is_told_at_once() -> None:
    with bounded(0) as group:
        fast = group.workers[0]
        fast.push()
        waiting = fast.pull(group.tables, budget_s=0)
        parked(fast.client, 1)
        group.group.end_client(fast.client)
        assert reason_of(lambda: fast.stream.answer(waiting)) == "CLIENT_CLOSED"


def test_clients_without_a_group_train_beside_it() -> None:
    with bounded(0) as group, group.shard.client() as outsider, raw_stream(outsider.channel) as stream:
        group.workers[0].push()
        for number in (1, 2, 3):
            stream.ask(outsider.push_request(number, group.tables[1], [1], [[1, 1]]))
            assert np.frombuffer(stream.ask(pull_of(outsider, group.tables, [1])).pull.rows, "<f4").shape == (4,)
        assert group.staleness()["count"] == 0
