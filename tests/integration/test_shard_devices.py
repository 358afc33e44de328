"""What a shard does, on every kind of device: the CPU, and the GPU path under Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from shardam_testing.processes import Shards, running_shards
from shardam_testing.raw_client import RawClient, id_bytes, raw_client

from shardam_proto.errors import ShardamError
from shardam_proto.schema import Constant, DtypeName, Normal, StepModeName, TableSpec
from shardam_proto.v1 import common_pb2, row_pb2

pytestmark = pytest.mark.device

NAMES = (f"t{number}" for number in range(1000))
CUDA_CPU = ("cpu", "interpret")


@dataclasses.dataclass
class OnDevice:
    """A client of a shard on one device."""

    name: str
    client: RawClient


@pytest.fixture(scope="module", params=CUDA_CPU)
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Shards]]:
    name: str = request.param
    with running_shards(tmp_path_factory.mktemp(name), device=name) as shards:
        yield name, shards


@pytest.fixture
def on_device(shards: tuple[str, Shards]) -> Iterator[OnDevice]:
    with raw_client(shards[1].view()) as client:
        client.open()
        yield OnDevice(shards[0], client)


def state(client: RawClient, table: common_pb2.TableInfo, row_ids: list[int]) -> bytes:
    rows = client.read(table, row_ids).rows
    return rows.weight + rows.exp_avg + rows.exp_avg_sq + rows.step + rows.found


def test_the_status_names_the_device(on_device: OnDevice) -> None:
    assert on_device.client.status().device == on_device.name


_BITS: dict[tuple[str, str], bytes] = {}
"""What the first device left, by dtype and step mode: the next must leave the same."""


@pytest.mark.parametrize("step", ["table", "row"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_pushes_leave_the_same_bits_on_every_device(on_device: OnDevice, dtype: DtypeName, step: StepModeName) -> None:
    client = on_device.client
    # Bits of initial and rounded weights depend on the table's name: the same on both devices.
    table = client.create(TableSpec(f"same-{dtype}-{step}", 10, dtype=dtype, step=step, init=Normal(0, 0.5)))[0]
    rng = np.random.default_rng(3)
    for number in range(1, 5):
        row_ids = rng.integers(-30, 30, 60).tolist()
        client.push(number, table, row_ids, rng.standard_normal((60, 10)))
    seen = state(client, table, list(range(-35, 35)))
    assert seen == _BITS.setdefault((dtype, step), seen)


def test_initial_weights_are_the_same_on_every_device_and_are_not_created(on_device: OnDevice) -> None:
    client = on_device.client
    table = client.create(TableSpec("initial", 12, padding_idx=3))[0]
    weights = client.pull(table, list(range(-5, 5)))
    assert weights.tobytes() == _BITS.setdefault(("initial", ""), weights.tobytes())
    assert not weights[8].any()
    assert client.info("initial").num_rows == 0


def test_long_runs_of_duplicates_are_summed_in_order_on_every_device(on_device: OnDevice) -> None:
    client = on_device.client
    table = client.create(TableSpec("runs", 6))[0]
    rng = np.random.default_rng(4)
    row_ids = [7] * 700 + rng.integers(0, 5, 100).tolist()
    client.push(1, table, row_ids, rng.standard_normal((800, 6)))
    seen = state(client, table, [0, 1, 2, 3, 4, 7])
    assert seen == _BITS.setdefault(("runs", ""), seen)


@pytest.mark.case("C004")
def test_an_empty_push_steps_the_table_and_an_empty_pull_reads_nothing(on_device: OnDevice) -> None:
    client = on_device.client
    table = client.create(TableSpec(next(NAMES), 3))[0]
    client.push(1, table, [], np.zeros((0, 3)))
    assert client.info(table.spec.name).table_step == 1
    assert client.pull(table, []).shape == (0, 3)


@pytest.mark.case("C035")
def test_a_bad_id_is_refused_before_any_kernel_and_the_next_push_works(on_device: OnDevice) -> None:
    client = on_device.client
    table = client.create(TableSpec(next(NAMES), 2, num_embeddings=10))[0]
    client.push(1, table, [1], [[1, 1]])
    before = state(client, table, [1, 2])
    for bad in (10, -1):
        with pytest.raises(ShardamError, match="ids are 0 to 9") as error:
            client.push(2, table, [1, bad], [[1, 1], [1, 1]])
        assert error.value.reason == "ID_OUT_OF_RANGE"
    assert state(client, table, [1, 2]) == before
    client.push(2, table, [1, 9], [[1, 1], [1, 1]])
    assert client.info(table.spec.name).num_rows == 2


@pytest.mark.case("C019")
@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**64])
def test_a_gradient_that_would_spoil_a_row_is_refused_on_every_device(on_device: OnDevice, value: float) -> None:
    client = on_device.client
    table = client.create(TableSpec(next(NAMES), 2))[0]
    client.push(1, table, [1, 2], [[1, 1], [2, 2]])
    before = state(client, table, [1, 2])
    with pytest.raises(ShardamError) as error:
        client.push(2, table, [1, 2], np.array([[1, 1], [value, 1]]))
    assert error.value.reason == "NON_FINITE_GRADIENT"
    assert state(client, table, [1, 2]) == before
    assert client.info(table.spec.name).table_step == 1


def test_rows_are_assigned_deleted_and_scanned_on_every_device(on_device: OnDevice) -> None:
    client = on_device.client
    table = client.create(TableSpec(next(NAMES), 2, init=Constant(0.25)))[0]

    def floats(*values: float) -> bytes:
        return np.array(values, "<f4").tobytes()

    assign = row_pb2.AssignRowsRequest(
        header=client.header(1),
        table_id=table.table_id,
        row_ids=id_bytes([5, -6]),
        weight=floats(1, 2, 3, 4),
        exp_avg=floats(5, 6, 7, 8),
    )
    assert client.call(client.row.AssignRows, assign).num_assigned == 2
    rows = client.read(table, [-6, 5]).rows
    assert rows.weight == floats(3, 4, 1, 2)
    assert rows.exp_avg == floats(7, 8, 5, 6)
    assert rows.exp_avg_sq == floats(0, 0, 0, 0)
    clear = row_pb2.ClearMomentsRequest(header=client.header(2), table_id=table.table_id, row_ids=id_bytes([5]))
    assert client.call(client.row.ClearMoments, clear).num_cleared == 1
    assert client.read(table, [5]).rows.exp_avg == floats(0, 0)
    delete = row_pb2.DeleteRowsRequest(header=client.header(3), table_id=table.table_id, row_ids=id_bytes([5]))
    assert client.call(client.row.DeleteRows, delete).num_deleted == 1
    assert client.pull(table, [5]).tolist() == [[0.25, 0.25]]
    scan = row_pb2.ScanRowsRequest(header=client.header(), table_id=table.table_id, max_rows=10)
    assert client.call(client.row.ScanRows, scan).rows.row_ids == id_bytes([-6])


@pytest.mark.case("C027")
@pytest.mark.parametrize("dim", [1, 5, 33, 129])
def test_records_of_odd_dims_keep_their_components_apart(on_device: OnDevice, dim: int) -> None:
    client = on_device.client
    table = client.create(TableSpec(f"dim-{dim}", dim))[0]
    rng = np.random.default_rng(dim)
    for number in (1, 2, 3):
        client.push(number, table, [1, 2, 3], rng.standard_normal((3, dim)))
    seen = state(client, table, [1, 2, 3])
    assert seen == _BITS.setdefault((f"dim-{dim}", ""), seen)


def test_growing_a_table_moves_no_row(on_device: OnDevice) -> None:
    client = on_device.client
    table = client.create(TableSpec("growing", 64))[0]
    client.push(1, table, [0], np.ones((1, 64)))
    first = state(client, table, [0])
    pushed: npt.NDArray[np.float32] = np.ones((3000, 64), np.float32)
    client.push(2, table, list(range(1, 3001)), pushed)
    assert state(client, table, [0])[: 3 * 256] == first[: 3 * 256]
    assert client.info("growing").num_rows == 3001
