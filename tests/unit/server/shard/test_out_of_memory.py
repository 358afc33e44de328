"""A device without room: the change is refused whole, and the shard goes on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from shardam_testing.full_device import FullDevice

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import OutOfMemory
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, decide, set_group, stage
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member
from shardam_server.shard.records import CpuRecords
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table, table_from_info

CLIENT = b"c" * 16


class World:
    """A shard of two tables on a device that can be full."""

    def __init__(self) -> None:
        self.device = FullDevice()
        self.state = ShardState(self.device)
        self.tables = [
            table_from_info(
                common_pb2.TableInfo(spec=TableSpec(name, 3, step="row").to_proto(), table_id=number, table_seed=1),
                self.device.make_records,
            )
            for number, name in ((1, "first"), (2, "second"))
        ]
        self.state.install(self.tables)
        self.push([1, 2])

    def push(self, row_ids: list[int]) -> None:
        ids, gradients = np.array(row_ids), np.ones((len(row_ids), 3), np.float32)
        self.state.push([GradientSection(table, ids, gradients, AdamOptions(lr=0.1), 1.0) for table in self.tables])

    def assign(self, row_ids: list[int]) -> None:
        weight = np.full((len(row_ids), 3), 5, np.float32)
        self.state.assign(self.tables[0], RowWrite(np.array(row_ids), weight, exp_avg=weight))

    def join(self) -> None:
        self.state.open_client(CLIENT)
        set_group(self.state, Group("workers", GroupTerms("sync", 1), 1, (Member(0, CLIENT),), 0), 0)

    def stage(self, row_ids: list[int]) -> None:
        ids, gradients = np.array(row_ids), np.ones((len(row_ids), 3), np.float32)
        sections = [GradientSection(table, ids, gradients, AdamOptions(lr=0.1), 1.0) for table in self.tables]
        stage(self.state, IncomingPart(Origin(CLIENT, 1, b"content"), 1, 0, "gradient", sections))

    def decide(self) -> None:
        decide(self.state, Decision("workers", 1, (Contribution(0, CLIENT, 1, "gradient"),), "applied"))

    def seen(self) -> list[tuple[int, int, bytes]]:
        return [(table.step, table.num_rows, self._bits(table)) for table in self.tables] + [(self.state.change_number, 0, b"")]

    @staticmethod
    def _bits(table: Table) -> bytes:
        batch = table.read(np.arange(10), include_optimizer=True)
        assert batch.exp_avg is not None
        assert batch.exp_avg_sq is not None
        columns = (batch.found, batch.weight, batch.exp_avg, batch.exp_avg_sq, batch.step, batch.change_number)
        return b"".join(column.tobytes() for column in columns)


@pytest.mark.case("C143")
@pytest.mark.parametrize("calls_left", [0, 1], ids=["first table", "second table"])
@pytest.mark.parametrize("operation", ["reserve", "initialize", "stage"])
def test_a_push_without_room_changes_no_table_and_the_next_one_works(operation: str, calls_left: int) -> None:
    check(operation, calls_left, lambda world: world.push([2, 3, 4]))


@pytest.mark.parametrize("operation", ["reserve", "initialize", "write"])
def test_an_assign_without_room_changes_nothing_and_the_next_one_works(operation: str) -> None:
    check(operation, 0, lambda world: world.assign([2, 3]))


@pytest.mark.parametrize("calls_left", [0, 1], ids=["first table", "second table"])
def test_a_part_for_whose_new_rows_there_is_no_room_is_refused_and_not_staged(calls_left: int) -> None:
    check("reserve", calls_left, lambda world: world.stage([2, 3, 4]), World.join)


@pytest.mark.parametrize("calls_left", [0, 1], ids=["first table", "second table"])
@pytest.mark.parametrize("operation", ["initialize", "stage"])
def test_a_decided_step_without_room_changes_no_table_and_is_carried_out_when_there_is_some(
    operation: str, calls_left: int
) -> None:
    def before(world: World) -> None:
        world.join()
        world.stage([2, 3, 4])

    check(operation, calls_left, World.decide, before)


def test_the_room_of_a_decided_step_is_made_when_its_parts_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = World(), list[int]()
    reserve = CpuRecords.reserve

    def note(records: CpuRecords, num_slots: int) -> None:
        asked.append(num_slots)
        reserve(records, num_slots)

    monkeypatch.setattr(CpuRecords, "reserve", note)
    world.join()
    world.stage([2, 3, 4])
    staged = max(asked)
    world.decide()
    assert max(asked) == staged == 4


def check(
    operation: str, calls_left: int, change: Callable[[World], None], before_it: Callable[[World], None] = lambda world: None
) -> None:
    world, twin = World(), World()
    for one in (world, twin):
        before_it(one)
    before = world.seen()
    world.device.fails_at, world.device.calls_left = operation, calls_left
    with pytest.raises(OutOfMemory, match=r"no memory for .* nothing was changed"):
        change(world)
    assert world.device.fired == 1
    assert world.seen() == before
    world.device.fails_at = ""
    change(world)
    change(twin)
    assert world.seen() == twin.seen()
