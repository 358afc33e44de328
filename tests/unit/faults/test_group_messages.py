"""The proxy and the messages of group steps, before a real gRPC server: what it keeps back waits, what it loses is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from shardam_testing.faults.group_messages import GroupMessage, MessageScanner
from shardam_testing.faults.network_faults import Lose
from shardam_testing.faults.proxy import FaultProxy
from shardam_testing.raw_stream import RawStream, raw_stream
from shardam_testing.waiting import wait_for

from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.v1 import common_pb2, embedding_pb2, embedding_pb2_grpc, group_pb2, shard_pb2, shard_pb2_grpc

HANG_S = 30.0
RANK = 2
LARGE_BYTES = 300_000
"""Many times what one frame holds."""


class Server(embedding_pb2_grpc.EmbeddingServiceServicer, shard_pb2_grpc.ShardServiceServicer):
    """Answers parts with STAGED, Arrive with a result, and UpdateGroup."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def Exchange(  # noqa: N802 - gRPC's name
        self, request_iterator: Iterator[embedding_pb2.ExchangeRequest], context: grpc.ServicerContext
    ) -> Iterator[embedding_pb2.ExchangeResponse]:
        for request in request_iterator:
            kind = str(request.WhichOneof("request"))
            header = request.push.header if kind == "push" else request.arrive.header
            self.seen.append((kind, header.step))
            if kind == "push":
                staged = embedding_pb2.PushResponse(staged=True)
                yield embedding_pb2.ExchangeResponse(request_id=header.request_id, push=staged)
            else:
                result = group_pb2.StepResult(step=header.step, end=group_pb2.STEP_END_APPLIED)
                arrive = embedding_pb2.ArriveResponse(result=result)
                yield embedding_pb2.ExchangeResponse(request_id=header.request_id, arrive=arrive)

    def UpdateGroup(  # noqa: N802 - gRPC's name
        self, request: shard_pb2.UpdateGroupRequest, context: grpc.ServicerContext
    ) -> shard_pb2.UpdateGroupResponse:
        self.seen.append(("update", request.decision.step))
        return shard_pb2.UpdateGroupResponse(version=1, step=request.decision.step)


@pytest.fixture
def server() -> Iterator[tuple[Server, FaultProxy]]:
    servicer = Server()  # type: ignore[abstract]  # nothing else is called
    grpc_server = grpc.server(futures.ThreadPoolExecutor(8), options=SERVER_OPTIONS)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(servicer, grpc_server)
    shard_pb2_grpc.add_ShardServiceServicer_to_server(servicer, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    with FaultProxy("shard 0", port, reads_messages=True) as proxy:
        yield servicer, proxy
    grpc_server.stop(None).wait()


@contextlib.contextmanager
def stream_of(proxy: FaultProxy) -> Iterator[RawStream]:
    """Opens a stream over a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(proxy.address, options=options) as channel, raw_stream(channel) as stream:
        yield stream


def header(step: int, request_id: int) -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(protocol_version=1, step=step, rank=RANK, number=step, request_id=request_id)


def part(stream: RawStream, step: int, num_bytes: int = 100) -> int:
    kind = group_pb2.CONTRIBUTION_KIND_GRADIENT
    push = embedding_pb2.PushRequest(header=header(step, 2 * step), contribution=kind, rows=bytes(num_bytes))
    stream.send_message(embedding_pb2.ExchangeRequest(push=push))
    return 2 * step


def arrive(stream: RawStream, step: int) -> int:
    request = embedding_pb2.ArriveRequest(header=header(step, 2 * step + 1))
    stream.send_message(embedding_pb2.ExchangeRequest(arrive=request))
    return 2 * step + 1


def update(proxy: FaultProxy, step: int) -> futures.Future[shard_pb2.UpdateGroupResponse]:
    def call() -> shard_pb2.UpdateGroupResponse:
        with grpc.insecure_channel(proxy.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            request = shard_pb2.UpdateGroupRequest(
                header=common_pb2.RequestHeader(protocol_version=1),
                group=group_pb2.Group(name="workers", version=3),
                step=step,
                decision=group_pb2.Decision(group="workers", step=step),
            )
            answer: shard_pb2.UpdateGroupResponse = shard_pb2_grpc.ShardServiceStub(channel).UpdateGroup(
                request, timeout=HANG_S, wait_for_ready=True
            )
            return answer

    pool = futures.ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("num_bytes", [0, LARGE_BYTES])
def test_an_arrive_is_kept_back_from_its_step_on_and_the_parts_before_it_pass(
    server: tuple[Server, FaultProxy], num_bytes: int
) -> None:
    servicer, proxy = server
    with stream_of(proxy) as stream:
        hold = proxy.hold("arrive", 4)
        for step in (3, 4):
            assert stream.answer(part(stream, step, num_bytes)).push.staged
            arrive(stream, step)
        wait_for("the arrive to be kept back", lambda: bool(hold.held))
        assert stream.answer(7).arrive.result.step == 3
        assert servicer.seen == [("push", 3), ("arrive", 3), ("push", 4)]
        assert (hold.held, hold.passed) == ([GroupMessage("arrive", 4, RANK)], [])
        proxy.release()
        assert stream.answer(9).arrive.result.step == 4


def test_a_hold_spares_the_first_connections_for_good(server: tuple[Server, FaultProxy]) -> None:
    servicer, proxy = server
    with stream_of(proxy) as first, stream_of(proxy) as second:
        hold = proxy.hold("arrive", 1, pass_first=1)
        assert first.answer(arrive(first, 1)).arrive.result.step == 1
        arrive(second, 1)
        wait_for("the other one to be kept back", lambda: bool(hold.held))
        assert first.answer(arrive(first, 2)).arrive.result.step == 2
        assert servicer.seen == [("arrive", 1), ("arrive", 2)]
        assert [message.step for message in hold.passed] == [1, 2]


def test_an_answer_that_is_kept_back_belongs_to_a_request_that_was_carried_out(server: tuple[Server, FaultProxy]) -> None:
    servicer, proxy = server
    with stream_of(proxy) as stream:
        hold = proxy.hold("result", 1)
        assert stream.answer(part(stream, 1)).push.staged
        request_id = arrive(stream, 1)
        wait_for("the result to be kept back", lambda: bool(hold.held))
        assert servicer.seen[-1] == ("arrive", 1)
        assert request_id not in stream.answers
        proxy.release()
        assert stream.answer(request_id).arrive.result.step == 1


def test_what_home_tells_a_peer_and_its_answer_are_told_apart(server: tuple[Server, FaultProxy]) -> None:
    servicer, proxy = server
    told, hold = proxy.hold("updated", 0, pass_first=100), proxy.hold("update", 6)
    assert update(proxy, 5).result(HANG_S).step == 5
    assert told.passed == [GroupMessage("updated", 5, -1)]
    waiting = update(proxy, 6)
    wait_for("the decision to be kept back", lambda: bool(hold.held))
    assert servicer.seen == [("update", 5)]
    proxy.release()
    assert waiting.result(HANG_S).step == 6


def test_a_message_that_is_lost_takes_its_connection_along_once(server: tuple[Server, FaultProxy]) -> None:
    servicer, proxy = server
    armed = proxy.arm(Lose("staged", from_step=2))
    with stream_of(proxy) as stream:
        assert stream.answer(part(stream, 1)).push.staged
        lost = part(stream, 2)
        armed.wait(HANG_S)
        assert stream.ended.wait(HANG_S)
        assert lost not in stream.answers
    assert servicer.seen == [("push", 1), ("push", 2)]
    assert [(fired.kind, fired.detail) for fired in proxy.fired] == [("lose", "staged of step 2, rank 2")]
    with stream_of(proxy) as again:
        assert again.answer(part(again, 2)).push.staged


def test_a_request_that_is_lost_never_arrives(server: tuple[Server, FaultProxy]) -> None:
    servicer, proxy = server
    armed = proxy.arm(Lose("arrive"))
    with stream_of(proxy) as stream:
        arrive(stream, 1)
        armed.wait(HANG_S)
        assert stream.ended.wait(HANG_S)
    assert servicer.seen == []


def test_messages_are_found_whatever_pieces_they_come_in() -> None:
    messages = [b"", b"one", bytes(70_000)]
    frames = b"".join(
        frame(0, bytes([0]) + len(message).to_bytes(4, "big") + message) + frame(6, bytes(8)) for message in messages
    )
    for size in (1, 3, 10, 1000, len(frames)):
        scanner, found, passed = MessageScanner(), [], 0
        for start in range(0, len(frames), size):
            piece = frames[start : start + size]
            found += [(start + end, message) for end, _, message in scanner.feed(piece)]
            passed += len(piece)
        assert [message for _, message in found] == messages
        assert found[0][0] == 9 + 5
        assert found[-1][0] == len(frames) - 9 - 8


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + (1).to_bytes(4, "big") + payload
