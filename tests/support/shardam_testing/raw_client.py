"""A client of one shard made of generated stubs alone: what any other language would send."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from shardam_proto.channels import Request, Response, UnaryCall, call, open_channel
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, ShardEntry
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import (
    common_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    row_pb2,
    row_pb2_grpc,
    shard_pb2,
    shard_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)

OPTIONS = common_pb2.AdamOptions(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, grad_scale=1.0)


def id_bytes(row_ids: Sequence[int]) -> bytes:
    return np.asarray(row_ids, dtype="<i8").tobytes()


@dataclasses.dataclass
class RawClient:
    """Calls one shard; every header field can be overridden per call."""

    channel: grpc.Channel
    entry: ShardEntry
    cluster_id: str
    epoch: int
    token: str | None = None
    client_id: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(16))

    def __post_init__(self) -> None:
        self._request_ids = itertools.count(1)
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(self.channel)
        self.row = row_pb2_grpc.RowServiceStub(self.channel)
        self.table = table_pb2_grpc.TableServiceStub(self.channel)
        self.shard = shard_pb2_grpc.ShardServiceStub(self.channel)

    def header(self, number: int = 0, **changes: bytes | float | str) -> common_pb2.RequestHeader:
        fields: dict[str, bytes | float | str] = {
            "protocol_version": PROTOCOL_VERSION,
            "cluster_id": self.cluster_id,
            "epoch": self.epoch,
            "incarnation": self.entry.incarnation,
            "client_id": self.client_id,
            "number": number,
            "request_id": next(self._request_ids),
            "budget_s": 10.0,
            **changes,
        }
        return common_pb2.RequestHeader(**fields)  # type: ignore[arg-type]  # names are checked at run time

    def call(self, method: UnaryCall[Request, Response], request: Request) -> Response:
        return call(method, request, timeout_s=10.0, token=self.token, peer="shard")

    def open(self, *, heartbeats: bool = False, **changes: bytes | float | str) -> embedding_pb2.OpenResponse:
        request = embedding_pb2.OpenRequest(
            header=self.header(0, **changes),
            min_protocol_version=PROTOCOL_VERSION,
            max_protocol_version=PROTOCOL_VERSION,
            heartbeats=heartbeats,
        )
        response: embedding_pb2.OpenResponse = self.call(self.embedding.Open, request)
        return response

    def heartbeat(self) -> embedding_pb2.HeartbeatResponse:
        response: embedding_pb2.HeartbeatResponse = self.call(
            self.embedding.Heartbeat, embedding_pb2.HeartbeatRequest(header=self.header())
        )
        return response

    def leave(self) -> embedding_pb2.LeaveResponse:
        response: embedding_pb2.LeaveResponse = self.call(
            self.embedding.Leave, embedding_pb2.LeaveRequest(header=self.header())
        )
        return response

    def create(self, *specs: TableSpec) -> list[common_pb2.TableInfo]:
        request = table_pb2.CreateTablesRequest(header=self.header(), specs=[spec.to_proto() for spec in specs])
        return list(self.call(self.table.CreateTables, request).tables)

    def push_request(
        self,
        number: int,
        table: common_pb2.TableInfo,
        row_ids: Sequence[int],
        gradients: npt.ArrayLike,
        **changes: bytes | float | str,
    ) -> embedding_pb2.PushRequest:
        section = common_pb2.Section(table_id=table.table_id, num_rows=len(row_ids), dtype=common_pb2.DTYPE_FLOAT32)
        return embedding_pb2.PushRequest(
            header=self.header(number, **changes),
            options=[OPTIONS],
            sections=[section],
            row_ids=id_bytes(row_ids),
            rows=np.asarray(gradients, dtype="<f4").tobytes(),
        )

    def push(
        self,
        number: int,
        table: common_pb2.TableInfo,
        row_ids: Sequence[int],
        gradients: npt.ArrayLike,
        **changes: bytes | float | str,
    ) -> embedding_pb2.PushResponse:
        request = self.push_request(number, table, row_ids, gradients, **changes)
        response: embedding_pb2.PushResponse = self.call(self.embedding.Push, request)
        return response

    def close_number(self, number: int, kind: int, table_ids: Sequence[int] = ()) -> embedding_pb2.CloseNumberResponse:
        request = embedding_pb2.CloseNumberRequest(header=self.header(number), kind=kind, table_ids=table_ids)  # type: ignore[arg-type]
        response: embedding_pb2.CloseNumberResponse = self.call(self.embedding.CloseNumber, request)
        return response

    def pull(self, table: common_pb2.TableInfo, row_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        section = common_pb2.Section(table_id=table.table_id, num_rows=len(row_ids), dtype=common_pb2.DTYPE_FLOAT32)
        request = embedding_pb2.PullRequest(header=self.header(), sections=[section], row_ids=id_bytes(row_ids))
        response = self.call(self.embedding.Pull, request)
        return np.frombuffer(response.rows, "<f4").reshape(len(row_ids), table.spec.dim)

    def read(self, table: common_pb2.TableInfo, row_ids: Sequence[int]) -> row_pb2.ReadRowsResponse:
        request = row_pb2.ReadRowsRequest(
            header=self.header(), table_id=table.table_id, include_optimizer=True, row_ids=id_bytes(row_ids)
        )
        response: row_pb2.ReadRowsResponse = self.call(self.row.ReadRows, request)
        return response

    def status(self) -> shard_pb2.GetStatusResponse:
        response: shard_pb2.GetStatusResponse = self.call(
            self.shard.GetStatus, shard_pb2.GetStatusRequest(header=self.header(client_id=b""))
        )
        return response

    def metrics(self) -> str:
        request = shard_pb2.GetMetricsRequest(header=self.header(client_id=b""))
        return self.call(self.shard.GetMetrics, request).text

    def info(self, name: str) -> common_pb2.TableInfo:
        request = table_pb2.ListTablesRequest(header=self.header(), names=[name])
        info: common_pb2.TableInfo = self.call(self.table.ListTables, request).tables[0]
        return info


@contextlib.contextmanager
def raw_client(view: ClusterView, index: int = 0, token: str | None = None) -> Iterator[RawClient]:
    """Opens a channel to one shard of a cluster; does not call Open."""
    assert view.entry is not None
    assert view.route_map is not None
    entry = view.shards[index]
    with open_channel(entry.address) as channel:
        yield RawClient(channel, entry, view.entry.cluster_id, view.route_map.epoch, token)
