"""One shard spoken to with generated stubs alone: numbers, refusals, tokens, health, malformed messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from shardam_testing.processes import Shards, running_shards
from shardam_testing.raw_client import OPTIONS, RawClient, id_bytes, raw_client

from shardam_proto.channels import open_channel
from shardam_proto.errors import ShardamError
from shardam_proto.schema import Constant, TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2, table_pb2

NAMES = (f"t{number}" for number in range(1000))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    with running_shards(tmp_path_factory.mktemp("shards")) as shards:
        yield shards


@pytest.fixture
def client(shards: Shards) -> Iterator[RawClient]:
    with raw_client(shards.view()) as client:
        client.open()
        yield client


@pytest.fixture
def table(client: RawClient) -> common_pb2.TableInfo:
    return client.create(TableSpec(next(NAMES), 2, init=Constant(0.5)))[0]


def reason_of(action: Callable[[], object]) -> str:
    with pytest.raises(ShardamError) as error:
        action()
    return error.value.reason


def test_a_push_is_applied_once_and_a_repeat_gets_its_answer(client: RawClient, table: common_pb2.TableInfo) -> None:
    first = client.push(1, table, [5, 5], [[1, 2], [3, 4]])
    before = client.read(table, [5])
    again = client.push(1, table, [5, 5], [[1, 2], [3, 4]])
    assert not first.repeated_number
    assert again.repeated_number
    assert again.steps == first.steps
    assert client.read(table, [5]).rows == before.rows
    assert client.info(table.spec.name).table_step == 1


def test_numbers_that_do_not_follow_are_refused_with_their_reason(client: RawClient, table: common_pb2.TableInfo) -> None:
    client.push(1, table, [1], [[1, 1]])
    assert reason_of(lambda: client.push(3, table, [1], [[1, 1]])) == "SEQUENCE_GAP"
    assert reason_of(lambda: client.push(1, table, [1], [[9, 9]])) == "SEQUENCE_REUSED"
    client.push(2, table, [1], [[1, 1]])
    assert client.push(1, table, [1], [[1, 1]]).repeated_number
    assert reason_of(lambda: client.push(0, table, [1], [[1, 1]])) == "SEQUENCE_EXPIRED"
    assert client.open().header.last_number == 2


def test_a_refused_push_changes_nothing_and_its_number_stays_open(client: RawClient, table: common_pb2.TableInfo) -> None:
    client.push(1, table, [1, 2], [[1, 1], [2, 2]])
    before = client.read(table, [1, 2])
    assert reason_of(lambda: client.push(2, table, [1, 2], np.array([[1, 1], [np.nan, 1]]))) == "NON_FINITE_GRADIENT"
    after = client.read(table, [1, 2])
    assert (after.rows, after.table_step) == (before.rows, before.table_step)
    client.push(2, table, [1, 2], [[1, 1], [1, 1]])
    info = client.info(table.spec.name)
    assert (info.table_step, info.nonfinite_pushes) == (2, 1)


def test_skip_uses_the_number_without_a_step_and_void_steps_the_tables_named(
    client: RawClient, table: common_pb2.TableInfo
) -> None:
    client.close_number(1, embedding_pb2.CLOSE_KIND_SKIP)
    assert client.close_number(1, embedding_pb2.CLOSE_KIND_SKIP).repeated_number
    assert client.info(table.spec.name).table_step == 0
    voided = client.close_number(2, embedding_pb2.CLOSE_KIND_VOID, [table.table_id])
    assert [(step.table_id, step.table_step) for step in voided.steps] == [(table.table_id, 1)]
    assert client.close_number(2, embedding_pb2.CLOSE_KIND_VOID, [table.table_id]).repeated_number
    assert client.info(table.spec.name).table_step == 1
    assert client.info(table.spec.name).num_rows == 0
    client.push(3, table, [1], [[1, 1]])
    assert client.info(table.spec.name).table_step == 2


def test_closing_a_number_that_was_applied_is_refused(client: RawClient, table: common_pb2.TableInfo) -> None:
    client.push(1, table, [1], [[1, 1]])
    assert reason_of(lambda: client.close_number(1, embedding_pb2.CLOSE_KIND_SKIP)) == "SEQUENCE_REUSED"


def test_a_client_that_left_cannot_push(client: RawClient, table: common_pb2.TableInfo) -> None:
    client.call(client.embedding.Leave, embedding_pb2.LeaveRequest(header=client.header()))
    assert reason_of(lambda: client.push(1, table, [1], [[1, 1]])) == "CLIENT_CLOSED"
    client.client_id = b"x" * 16
    assert reason_of(lambda: client.push(1, table, [1], [[1, 1]])) == "UNKNOWN_CLIENT"


def test_versions_without_overlap_name_both_sides(client: RawClient) -> None:
    request = embedding_pb2.OpenRequest(header=client.header(), min_protocol_version=7, max_protocol_version=9)
    with pytest.raises(ShardamError, match=r"7 to 9.*1 to 1") as error:
        client.call(client.embedding.Open, request)
    assert error.value.reason == "VERSION_MISMATCH"


@pytest.mark.case("C036")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"row_ids": b"1234567"}, "WRONG_SHAPE"),
        ({"row_ids": id_bytes([1])}, "WRONG_SHAPE"),
        ({"rows": b"\0" * 12}, "WRONG_SHAPE"),
        ({"rows": b""}, "WRONG_SHAPE"),
        ({"options": []}, "BAD_OPTION"),
    ],
)
def test_a_malformed_push_is_refused_whole(
    client: RawClient, table: common_pb2.TableInfo, change: dict[str, object], reason: str
) -> None:
    request = client.push_request(1, table, [1, 2], [[1, 1], [2, 2]])
    for name, value in change.items():
        request.ClearField(name)  # type: ignore[arg-type]  # names of the message
        if value:
            setattr(request, name, value)
    assert reason_of(lambda: client.call(client.embedding.Push, request)) == reason
    info = client.info(table.spec.name)
    assert (info.table_step, info.num_rows) == (0, 0)


def test_a_push_of_two_tables_is_refused_whole_when_one_part_is_bad(client: RawClient) -> None:
    good, bad = client.create(TableSpec(next(NAMES), 1), TableSpec(next(NAMES), 1, num_embeddings=3))
    sections = [common_pb2.Section(table_id=info.table_id, num_rows=1, dtype=common_pb2.DTYPE_FLOAT32) for info in (good, bad)]
    request = embedding_pb2.PushRequest(
        header=client.header(1),
        options=[OPTIONS],
        sections=sections,
        row_ids=id_bytes([1, 3]),
        rows=np.ones(2, "<f4").tobytes(),
    )
    assert reason_of(lambda: client.call(client.embedding.Push, request)) == "ID_OUT_OF_RANGE"
    assert [client.info(info.spec.name).table_step for info in (good, bad)] == [0, 0]
    request.sections[1].table_id = good.table_id
    assert reason_of(lambda: client.call(client.embedding.Push, request)) == "WRONG_SHAPE"
    request.sections[1].table_id = 12345
    assert reason_of(lambda: client.call(client.embedding.Push, request)) == "UNKNOWN_TABLE"


@pytest.mark.case("C040")
def test_reading_never_creates_a_row(client: RawClient, table: common_pb2.TableInfo) -> None:
    weights = client.pull(table, list(range(100)))
    rows = client.read(table, [3, 4])
    assert (weights == 0.5).all()
    assert rows.rows.found == b"\0\0"
    assert client.info(table.spec.name).num_rows == 0


@pytest.mark.case("C043")
def test_the_row_limit_refuses_the_whole_push_and_names_limit_and_remedy(client: RawClient) -> None:
    info = client.create(TableSpec(next(NAMES), 1, max_rows_per_shard=10))[0]
    client.push(1, info, list(range(8)), np.ones((8, 1)))
    with pytest.raises(ShardamError, match="may hold 10") as error:
        client.push(2, info, [0, 100, 101, 102], np.ones((4, 1)))
    assert (error.value.reason, error.value.metadata["limit"]) == ("ROW_LIMIT", "10")
    after = client.info(info.spec.name)
    assert (after.num_rows, after.table_step) == (8, 1)
    client.push(2, info, [0, 100, 101], np.ones((3, 1)))
    assert client.info(info.spec.name).num_rows == 10


@pytest.mark.case("C047")
def test_creating_a_table_again_is_a_no_op_and_another_schema_is_refused(client: RawClient) -> None:
    spec = TableSpec(next(NAMES), 8)
    assert client.create(spec)[0].table_id == client.create(spec, spec)[1].table_id
    with pytest.raises(ShardamError, match=r"dim=8.*dim=16") as error:
        client.create(TableSpec(next(NAMES), 4), TableSpec(spec.name, 16))
    assert error.value.reason == "SCHEMA_MISMATCH"
    names = {
        table.spec.name
        for table in client.call(client.table.ListTables, table_pb2.ListTablesRequest(header=client.header())).tables
    }
    assert f"t{next(NAMES)[1:]}" not in names


def test_listing_is_paged_by_name(client: RawClient) -> None:
    client.create(*(TableSpec(f"page.{number:02}", 1) for number in range(7)))
    seen: list[str] = []
    after = "page"
    while True:
        page = client.call(
            client.table.ListTables, table_pb2.ListTablesRequest(header=client.header(), page_size=3, after_name=after)
        )
        seen += [table.spec.name for table in page.tables]
        after = page.next_after_name
        if not after:
            break
    assert [name for name in seen if name.startswith("page.")] == [f"page.{number:02}" for number in range(7)]


@pytest.mark.case("C044")
def test_a_deleted_row_comes_back_with_its_initial_weight_and_zero_moments(
    client: RawClient, table: common_pb2.TableInfo
) -> None:
    client.push(1, table, [8], [[1, 1]])
    deleted = client.call(
        client.row.DeleteRows,
        row_pb2.DeleteRowsRequest(header=client.header(2), table_id=table.table_id, row_ids=id_bytes([8, 9])),
    )
    assert deleted.num_deleted == 1
    gone = client.read(table, [8])
    assert (gone.rows.found, np.frombuffer(gone.rows.exp_avg, "<f4").tolist()) == (b"\0", [0, 0])
    client.push(3, table, [8], [[0, 0]])
    back = client.read(table, [8])
    assert np.frombuffer(back.rows.weight, "<f4").tolist() == [0.5, 0.5]
    assert np.frombuffer(back.rows.exp_avg_sq, "<f4").tolist() == [0, 0]


def test_assign_repeats_safely_and_refuses_what_is_not_finite(client: RawClient, table: common_pb2.TableInfo) -> None:
    def assign(number: int, value: float, **fields: object) -> row_pb2.AssignRowsResponse:
        request = row_pb2.AssignRowsRequest(
            header=client.header(number),
            table_id=table.table_id,
            row_ids=id_bytes([1]),
            weight=np.full(2, value, "<f4").tobytes(),
            **fields,  # type: ignore[arg-type]  # fields of the message
        )
        response: row_pb2.AssignRowsResponse = client.call(client.row.AssignRows, request)
        return response

    assert assign(1, 2.0).num_assigned == 1
    assert assign(1, 2.0).repeated_number
    assert assign(2, 3.0, if_absent=True).num_assigned == 0
    assert client.pull(table, [1]).tolist() == [[2.0, 2.0]]
    assert reason_of(lambda: assign(3, float("inf"))) == "NON_FINITE_STATE"
    assert reason_of(lambda: assign(3, 1.0, exp_avg_sq=np.full(2, -1, "<f4").tobytes())) == "NON_FINITE_STATE"
    assert client.pull(table, [1]).tolist() == [[2.0, 2.0]]


def test_clearing_moments_is_a_numbered_change_that_keeps_weight_and_step(
    client: RawClient, table: common_pb2.TableInfo
) -> None:
    client.push(1, table, [1, 2], [[1, 2], [3, 4]])
    before = client.read(table, [1, 2]).rows

    def clear() -> row_pb2.ClearMomentsResponse:
        request = row_pb2.ClearMomentsRequest(header=client.header(2), table_id=table.table_id, row_ids=id_bytes([1, 77, 1]))
        answer: row_pb2.ClearMomentsResponse = client.call(client.row.ClearMoments, request)
        return answer

    first, again = clear(), clear()
    assert (first.num_cleared, first.repeated_number) == (1, False)
    assert (again.num_cleared, again.repeated_number, again.change_number) == (1, True, first.change_number)
    after = client.read(table, [1, 2]).rows
    assert np.frombuffer(after.exp_avg, "<f4").reshape(2, 2)[0].tolist() == [0, 0]
    assert np.frombuffer(after.exp_avg_sq, "<f4").reshape(2, 2)[0].tolist() == [0, 0]
    assert (after.weight, after.step, after.last_touched_step) == (before.weight, before.step, before.last_touched_step)
    assert after.exp_avg[8:] == before.exp_avg[8:]
    assert np.frombuffer(after.change_number, "<u8").tolist() == [first.change_number, first.change_number - 1]
    assert client.info(table.spec.name).num_rows == 2


@pytest.mark.parametrize(
    ("condition", "row_ids", "holds"),
    [
        (row_pb2.RowCondition(), [1, 9], True),
        (row_pb2.RowCondition(exists=True), [1, 2], True),
        (row_pb2.RowCondition(exists=True), [1, 9], False),
        (row_pb2.RowCondition(exists=False), [8, 9], True),
        (row_pb2.RowCondition(exists=False), [1, 9], False),
        (row_pb2.RowCondition(exists=False), [], True),
    ],
)
def test_a_change_is_made_only_if_its_condition_holds_of_every_row(
    client: RawClient, table: common_pb2.TableInfo, condition: row_pb2.RowCondition, row_ids: list[int], holds: bool
) -> None:
    client.push(1, table, [1, 2], [[1, 2], [3, 4]])
    before = client.read(table, [1, 2, 8, 9]).rows
    changes: list[Callable[[int], object]] = [
        lambda number: client.call(
            client.row.ClearMoments,
            row_pb2.ClearMomentsRequest(
                header=client.header(number), table_id=table.table_id, row_ids=id_bytes(row_ids), condition=condition
            ),
        ),
        lambda number: client.call(
            client.row.AssignRows,
            row_pb2.AssignRowsRequest(
                header=client.header(number),
                table_id=table.table_id,
                row_ids=id_bytes(row_ids),
                weight=np.ones((len(row_ids), 2), "<f4").tobytes(),
                condition=condition,
            ),
        ),
    ]
    if holds:
        for number, change in enumerate(changes, 2):
            change(number)
        assert client.open().header.last_number == 3
        return
    for change in changes:
        assert reason_of(lambda change=change: change(2)) == "ETAG_MISMATCH"  # type: ignore[misc]  # bound at once
    assert client.read(table, [1, 2, 8, 9]).rows == before
    assert client.open().header.last_number == 1  # the number stays open


def test_a_change_number_condition_holds_until_the_row_changes(client: RawClient, table: common_pb2.TableInfo) -> None:
    client.push(1, table, [1, 2], [[1, 2], [3, 4]])
    read = int.from_bytes(client.read(table, [1]).rows.change_number, "little")

    def delete(number: int, change_number: int) -> row_pb2.DeleteRowsResponse:
        request = row_pb2.DeleteRowsRequest(
            header=client.header(number),
            table_id=table.table_id,
            row_ids=id_bytes([1]),
            condition=row_pb2.RowCondition(change_number=change_number),
        )
        answer: row_pb2.DeleteRowsResponse = client.call(client.row.DeleteRows, request)
        return answer

    client.push(2, table, [2], [[1, 1]])  # another row's change does not matter
    assert reason_of(lambda: delete(3, read + 1)) == "ETAG_MISMATCH"
    client.push(3, table, [1], [[1, 1]])
    assert reason_of(lambda: delete(4, read)) == "ETAG_MISMATCH"
    now = int.from_bytes(client.read(table, [1]).rows.change_number, "little")
    assert delete(4, now).num_deleted == 1
    assert delete(4, now).repeated_number  # the former answer, though the row is gone
    assert reason_of(lambda: delete(5, now)) == "ETAG_MISMATCH"
    assert reason_of(lambda: delete(5, 0)) == "ETAG_MISMATCH"  # a row that does not exist has no change number


def test_a_scan_meets_every_row_once_in_pages(client: RawClient, table: common_pb2.TableInfo) -> None:
    row_ids = [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1, *range(100, 150)]
    client.push(1, table, row_ids, np.ones((len(row_ids), 2)))
    seen: list[int] = []
    key: int | None = 0
    while key is not None:
        page = client.call(
            client.row.ScanRows,
            row_pb2.ScanRowsRequest(header=client.header(), table_id=table.table_id, from_key=key, max_rows=7),
        )
        seen += np.frombuffer(page.rows.row_ids, "<i8").tolist()
        key = page.next_key if page.HasField("next_key") else None
    assert sorted(seen) == sorted(row_ids)


@pytest.mark.case("C140")
def test_health_and_reflection_answer_by_the_standard_services(client: RawClient) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "shardam.v1.EmbeddingService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)  # type: ignore[attr-defined]  # not in the stubs
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=10)))  # type: ignore[operator]  # not in the stubs
    assert "shardam.v1.RowService" in {service.name for service in answer.list_services_response.service}


def test_with_a_token_every_call_but_health_needs_it(tmp_path: Path) -> None:
    with running_shards(tmp_path, token="s3cret") as shards:
        view = shards.view()
        for wrong in (None, "wrong"):
            with raw_client(view, token=wrong) as stranger:
                assert reason_of(stranger.open) == "BAD_TOKEN"
                assert reason_of(stranger.status) == "BAD_TOKEN"
        list_services = reflection_pb2.ServerReflectionRequest(list_services="")
        with open_channel(view.shards[0].address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.RpcError) as error:
                next(iter(stub.ServerReflectionInfo(iter([list_services]), timeout=10)))  # type: ignore[operator]  # not in the stubs
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]  # not in the stubs
        with raw_client(view, token="s3cret") as friend:
            friend.open()
            assert friend.status().num_clients == 1
        assert "s3cret" not in shards.processes[0].log_text()
