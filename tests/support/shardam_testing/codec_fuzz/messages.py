"""The messages that are broken: every kind of request on a stream, with the values that are likeliest to be mistaken."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from hypothesis import strategies as st

from shardam_proto import wire
from shardam_proto.v1 import common_pb2, embedding_pb2, row_pb2
from shardam_testing.raw_client import OPTIONS, id_bytes

BUDGET_S = 30.0
"""No answer of these tests takes a hundredth of this."""

KINDS = ("pull", "pull_changed", "push", "chunk", "close_number", "assign_rows", "delete_rows", "clear_moments", "arrive")
"""What a plan may ask for: the fields of ExchangeRequest, and a push that is one chunk of several."""

MESSAGE_OF_KIND = {
    "pull": embedding_pb2.PullRequest,
    "pull_changed": embedding_pb2.PullChangedRequest,
    "push": embedding_pb2.PushRequest,
    "close_number": embedding_pb2.CloseNumberRequest,
    "assign_rows": row_pb2.AssignRowsRequest,
    "delete_rows": row_pb2.DeleteRowsRequest,
    "clear_moments": row_pb2.ClearMomentsRequest,
    "arrive": embedding_pb2.ArriveRequest,
}
"""The message of each field of ExchangeRequest."""

UINT32S = st.sampled_from([0, 1, 2, 3, 5, 127, 128, 2**16, 2**31, 2**32 - 1])
UINT64S = st.sampled_from([0, 1, 2, 3, 127, 128, 2**31, 2**32, 2**62, 2**63, 2**64 - 1])

HEADER_CHANGES = st.one_of(
    st.tuples(st.sampled_from(["protocol_version", "rank", "chunk_index", "num_chunks"]), UINT32S),
    st.tuples(st.sampled_from(["timeline", "epoch", "incarnation", "number", "step", "request_id"]), UINT64S),
    st.tuples(st.just("budget_s"), st.sampled_from([0.0, -1.0, float("nan"), float("inf")])),
    st.tuples(st.just("cluster_id"), st.sampled_from(["", "another", "ö" * 40])),
    st.tuples(st.just("client_id"), st.sampled_from([b"", b"short", b"of another one..", bytes(300)])),
)
"""A field of the header, and what it is set to."""

BODY_CHANGES = st.one_of(
    st.tuples(st.just("num_rows"), UINT64S),
    st.tuples(st.just("table_id"), UINT64S),
    st.tuples(st.just("options_index"), UINT32S),
    st.tuples(st.just("dtype"), st.integers(0, 5)),
    st.tuples(st.sampled_from(["total_bytes", "chunk_bytes", "change_number"]), UINT64S),
    st.tuples(st.sampled_from(["row_ids", "rows", "padding", "weight"]), st.binary(max_size=40)),
)
"""A field of the message or of its first section, and what it is set to; passed over where the message has none."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A message before it is known which client sends it.

    Attributes:
        kind: one of KINDS.
        row_ids: the rows it names, per table.
        ahead: how far its number is beyond the client's next one; 0: it fits.
        value: of every gradient or weight.
        header: what of the header is set otherwise.
        body: what else is set otherwise.
    """

    kind: str
    row_ids: tuple[tuple[int, ...], ...]
    ahead: int
    value: float
    header: Mapping[str, bytes | float | str]
    body: Mapping[str, bytes | int]


ROW_IDS = st.lists(st.integers(0, 40) | st.sampled_from([-1, 2**62, 2**63 - 1]), max_size=12).map(tuple)

PLANS = st.builds(
    Plan,
    kind=st.sampled_from(KINDS),
    row_ids=st.lists(ROW_IDS, min_size=1, max_size=3).map(tuple),
    ahead=st.sampled_from([0] * 6 + [-1, 1]),
    value=st.sampled_from([0.5] * 6 + [-3.0, float("nan"), float("inf")]),
    header=st.just({}) | st.lists(HEADER_CHANGES, max_size=2).map(dict),
    body=st.just({}) | st.lists(BODY_CHANGES, max_size=2).map(dict),
)


class Sender(Protocol):
    """Makes headers of one client's messages; RawClient does."""

    def header(self, number: int = 0, **changes: bytes | float | str) -> common_pb2.RequestHeader:
        """Returns a header with a request id of its own."""
        ...


class NoShard:
    """Makes headers of messages that no shard gets."""

    def header(self, number: int = 0, **changes: bytes | float | str) -> common_pb2.RequestHeader:
        return common_pb2.RequestHeader(protocol_version=1, number=number, request_id=300, client_id=b"c" * 16, **changes)  # type: ignore[arg-type]  # as RawClient


def build(plan: Plan, client: Sender, next_number: int, tables: list[common_pb2.TableInfo]) -> embedding_pb2.ExchangeRequest:
    """Makes the message that a client sends."""
    header = client.header(0, budget_s=BUDGET_S)
    if plan.kind not in ("pull", "pull_changed", "arrive"):
        header.number = max(0, next_number + plan.ahead)
    used = list(zip(tables, plan.row_ids, strict=False))
    sections = [
        common_pb2.Section(table_id=table.table_id, num_rows=len(row_ids), dtype=common_pb2.DTYPE_FLOAT32)
        for table, row_ids in used
    ]
    ids = b"".join(id_bytes(row_ids) for _, row_ids in used)
    values = b"".join(np.full(len(row_ids) * table.spec.dim, plan.value, "<f4").tobytes() for table, row_ids in used)
    first_table, first_ids = used[0]
    kind = "push" if plan.kind == "chunk" else plan.kind
    body = MESSAGE_OF_KIND[kind](header=header)
    match plan.kind:
        case "pull" | "pull_changed":
            body.sections.extend(sections)
            body.row_ids = ids
        case "push":
            body.sections.extend(sections)
            body.options.append(OPTIONS)
            body.row_ids, body.rows = ids, values
        case "chunk":
            body.sections.extend(sections)
            body.options.append(OPTIONS)
            body.header.num_chunks, body.total_bytes, body.row_ids = 2, len(ids) + len(values), ids
        case "close_number":
            body.kind = embedding_pb2.CLOSE_KIND_VOID
            body.table_ids.append(first_table.table_id)
        case "assign_rows":
            weight = np.full(len(first_ids) * first_table.spec.dim, plan.value, "<f4")
            body.table_id, body.row_ids, body.weight = first_table.table_id, id_bytes(first_ids), weight.tobytes()
        case "delete_rows" | "clear_moments":
            body.table_id, body.row_ids = first_table.table_id, id_bytes(first_ids)
        case "arrive":
            pass
    _change(body, plan)
    return embedding_pb2.ExchangeRequest(**{kind: body})


def _change(body: embedding_pb2.PushRequest, plan: Plan) -> None:
    for name, value in plan.header.items():
        setattr(body.header, name, value)
    for name, value in plan.body.items():
        if name == "padding" and hasattr(body, name):
            body.padding.append(bytes(value))
        elif name in common_pb2.Section.DESCRIPTOR.fields_by_name and hasattr(body, "sections"):
            setattr(body.sections[0], name, value)
        elif hasattr(body, name):
            setattr(body, name, value)


def second_half(message: embedding_pb2.ExchangeRequest, rows: bytes) -> embedding_pb2.ExchangeRequest:
    """Returns the last chunk of the part that a plan's chunk begins."""
    chunk = embedding_pb2.PushRequest(rows=rows)
    chunk.header.CopyFrom(message.push.header)
    chunk.header.chunk_index = 1
    return embedding_pb2.ExchangeRequest(push=chunk)


def lay_out(message: embedding_pb2.ExchangeRequest) -> bytes:
    """Encodes a message as clients do: its payloads last and aligned; one without payloads as protobuf does."""
    kind = message.WhichOneof("request")
    if kind not in ("pull", "pull_changed", "push"):
        return message.SerializeToString()
    body = embedding_pb2.ExchangeRequest.FromString(message.SerializeToString())
    inner = getattr(body, kind)
    payloads = [inner.row_ids, inner.rows if kind == "push" else b""]
    for name in ("row_ids", "rows", "padding"):
        if name in inner.DESCRIPTOR.fields_by_name:
            inner.ClearField(name)
    field = embedding_pb2.ExchangeRequest.DESCRIPTOR.fields_by_name[kind].number
    frame = wire.frame(field, inner.SerializeToString(), [len(payload) for payload in payloads])
    filled = [payload for payload in payloads if payload] or [b""]
    return b"".join(piece for pair in zip(frame.prefixes, filled, strict=True) for piece in pair)
