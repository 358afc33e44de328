"""EmbeddingService: open, pull, push, close a number, leave."""

from __future__ import annotations

import grpc.aio
import xxhash

from shardam_proto.errors import BadOption, VersionMismatch, WrongShape
from shardam_proto.limits import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from shardam_proto.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc
from shardam_server.shard.client_closing import ClientClosing
from shardam_server.shard.clients import Origin, Outcome
from shardam_server.shard.context import ShardContext
from shardam_server.shard.option_messages import decode_options
from shardam_server.shard.records import Float32s
from shardam_server.shard.services import client_life
from shardam_server.shard.services.decoding import check_owned, decode_sections, encode, split_rows
from shardam_server.shard.state import read_locks
from shardam_server.shard.table import GradientSection


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Training traffic of one shard.

    Args:
        shard: the shard.
        closing: closes clients on all shards, if this one is home.
    """

    def __init__(self, shard: ShardContext, closing: ClientClosing) -> None:
        self._shard = shard
        self._closing = closing

    async def Open(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.OpenRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.OpenRequest, embedding_pb2.OpenResponse],
    ) -> embedding_pb2.OpenResponse:
        """Registers a client, or tells where a known one stands."""
        shard = self._shard
        shard.check_serving(request.header)
        low, high = request.min_protocol_version, request.max_protocol_version
        if not low <= high:
            raise BadOption(f"min_protocol_version {low} is above max_protocol_version {high}")
        version = min(high, PROTOCOL_VERSION)
        if version < max(low, MIN_PROTOCOL_VERSION):
            raise VersionMismatch(
                f"the client speaks protocol versions {low} to {high}, shard {shard.identity.index} {MIN_PROTOCOL_VERSION} to "
                f"{PROTOCOL_VERSION}; use matching shardam packages"
            )
        client_id = request.header.client_id
        entry = await shard.change(lambda: shard.state.open_client(client_id, heartbeats=request.heartbeats))
        return embedding_pb2.OpenResponse(
            header=shard.header(request.header, entry.last_number),
            protocol_version=version,
            cluster_id=shard.identity.require_cluster().cluster_id,
            num_shards=shard.identity.require_route_map().num_shards,
            client_lease_s=shard.client_lease_s,
        )

    async def Pull(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.PullRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.PullRequest, embedding_pb2.PullResponse],
    ) -> embedding_pb2.PullResponse:
        """Reads weights; creates nothing."""
        self._shard.check_serving(request.header)
        return await self._shard.sequencer.read(lambda: self._pull(request))

    def _pull(self, request: embedding_pb2.PullRequest) -> embedding_pb2.PullResponse:
        shard = self._shard
        sections = decode_sections(shard.state, request.sections, request.row_ids)
        parts: list[Float32s] = []
        steps: list[common_pb2.TableStep] = []
        with read_locks(section.table for section in sections):
            for section in sections:
                section.table.check_ids(section.row_ids)
                check_owned(shard.identity, section.table, section.row_ids)
                parts.append(section.table.gather(section.row_ids))
                steps.append(common_pb2.TableStep(table_id=section.table.table_id, table_step=section.table.step))
        shard.metrics.pulls.inc()
        shard.metrics.rows_pulled.inc(sum(len(part) for part in parts))
        return embedding_pb2.PullResponse(
            header=shard.header(request.header),
            steps=steps,
            sections=request.sections,
            rows=b"".join(encode(part) for part in parts),
        )

    async def Push(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.PushRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.PushRequest, embedding_pb2.PushResponse],
    ) -> embedding_pb2.PushResponse:
        """Applies one part of an optimizer step."""
        self._shard.check_serving(request.header)
        self._shard.sequencer.check_room()
        return await self._shard.change(lambda: self._push(request), request.ByteSize())

    def _push(self, request: embedding_pb2.PushRequest) -> embedding_pb2.PushResponse:
        shard, header = self._shard, request.header
        row_ids, rows = request.row_ids, request.rows  # each access copies
        digest = xxhash.xxh3_128()
        for message in (*request.options, *request.sections):
            digest.update(message.SerializeToString(deterministic=True) + b"\n")
        digest.update(row_ids)
        digest.update(rows)

        origin = Origin(header.client_id, header.number, b"push" + digest.digest())

        def apply() -> Outcome:
            return shard.state.push(self._sections(request, row_ids, rows), origin)

        outcome, repeated = shard.state.run_number(origin, apply)
        if not repeated:
            shard.metrics.pushes.inc()
            shard.metrics.rows_pushed.inc(len(row_ids) // 8)
        return embedding_pb2.PushResponse(
            header=shard.header(header, header.number), steps=_table_steps(outcome), repeated_number=repeated
        )

    def _sections(self, request: embedding_pb2.PushRequest, row_ids: bytes, rows: bytes) -> list[GradientSection]:
        """Checks a push's form and routes.

        Raises:
            ShardamError: a section is malformed or misrouted.
        """
        shard = self._shard
        decoded = decode_sections(shard.state, request.sections, row_ids)
        if len({section.table.table_id for section in decoded}) != len(decoded):
            raise WrongShape("a push names a table in two sections; merge them into one")
        result = []
        for section, gradients in zip(decoded, split_rows(decoded, rows), strict=True):
            if section.message.options_index >= len(request.options):
                raise BadOption(
                    f"table {section.table.spec.name!r}: options_index {section.message.options_index} lies outside the "
                    f"push's {len(request.options)} options"
                )
            options = request.options[section.message.options_index]
            section.table.check_ids(section.row_ids)
            check_owned(shard.identity, section.table, section.row_ids)
            result.append(
                GradientSection(section.table, section.row_ids, gradients, decode_options(options), options.grad_scale)
            )
        return result

    async def CloseNumber(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.CloseNumberRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.CloseNumberRequest, embedding_pb2.CloseNumberResponse],
    ) -> embedding_pb2.CloseNumberResponse:
        """Uses a number up without applying its change here."""
        shard, header = self._shard, request.header
        shard.check_serving(header)
        if request.kind not in (embedding_pb2.CLOSE_KIND_SKIP, embedding_pb2.CLOSE_KIND_VOID):
            raise BadOption(f"kind must be SKIP or VOID, got {request.kind}")
        if request.kind == embedding_pb2.CLOSE_KIND_SKIP and request.table_ids:
            raise BadOption("SKIP steps no table; table_ids must be empty")
        table_ids = list(request.table_ids)
        origin = Origin(header.client_id, header.number, f"close {request.kind} {sorted(table_ids)}".encode())

        def close() -> tuple[Outcome, bool]:
            return shard.state.run_number(origin, lambda: shard.state.void(table_ids, origin))

        outcome, repeated = await shard.change(close)
        return embedding_pb2.CloseNumberResponse(
            header=shard.header(header, header.number), steps=_table_steps(outcome), repeated_number=repeated
        )

    async def Heartbeat(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.HeartbeatRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.HeartbeatRequest, embedding_pb2.HeartbeatResponse],
    ) -> embedding_pb2.HeartbeatResponse:
        """Notes a sign of life; on home only."""
        return await client_life.hear(self._shard, request)

    async def Leave(  # noqa: N802 - the service's name
        self,
        request: embedding_pb2.LeaveRequest,
        context: grpc.aio.ServicerContext[embedding_pb2.LeaveRequest, embedding_pb2.LeaveResponse],
    ) -> embedding_pb2.LeaveResponse:
        """Ends a client; on home on all shards."""
        return await client_life.leave(self._shard, self._closing, request)


def _table_steps(outcome: Outcome) -> list[common_pb2.TableStep]:
    return [common_pb2.TableStep(table_id=table_id, table_step=step) for table_id, step in outcome.steps.items()]
