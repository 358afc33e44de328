"""The proxy of the fault tests, before a plain echo and before gRPC calls: what it promises to do to bytes, it does."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from shardam_testing.faults.network_faults import Cut, Delay, Direction, Drop, Partition, Swallow
from shardam_testing.faults.proxy import FaultProxy
from shardam_testing.processes import free_port
from shardam_testing.waiting import wait_for

HANG_S = 30.0


@contextlib.contextmanager
def echo_server() -> Iterator[tuple[int, list[int]]]:
    """Answers every byte with itself; yields its port and how many bytes each connection has brought."""
    received: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket, place: int) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65_536):
                received[place] += len(data)
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                received.append(0)
                threading.Thread(target=serve, args=(connection, len(received) - 1), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield listener.getsockname()[1], received
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied_echo() -> Iterator[tuple[FaultProxy, list[int]]]:
    with echo_server() as (port, received), FaultProxy("echo", port) as proxy:
        yield proxy, received


def connect(proxy: FaultProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def echo(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return read(connection, len(data))


def read(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns so many bytes, or fewer if the connection ends."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while len(got) < num_bytes and (piece := connection.recv(num_bytes - len(got))):
            got += piece
    return got


def ends_at_once(proxy: FaultProxy) -> bool:
    try:
        with connect(proxy) as connection:
            return read(connection, 1) == b""
    except ConnectionError:  # the end was quicker than we
        return True


def test_without_faults_every_byte_passes_and_is_counted() -> None:
    data = bytes(range(256)) * 4096
    with proxied_echo() as (proxy, received), connect(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert read(connection, len(data)) == data
        sender.join(HANG_S)
        assert proxy.bytes_seen(Direction.REQUESTS) == proxy.bytes_seen(Direction.REPLIES) == len(data) == received[0]
        assert proxy.fired == []


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("after_bytes", [0, 1, 999, 1000])
def test_a_cut_comes_exactly_at_its_byte_and_counts_once(after_bytes: int, reset: bool) -> None:
    with proxied_echo() as (proxy, received), connect(proxy) as connection:
        assert echo(connection, b"before") == b"before"
        armed = proxy.arm(Cut(after_bytes, reset=reset))
        connection.sendall(bytes(1000))
        armed.wait(HANG_S)
        assert len(read(connection, 1001)) <= after_bytes
        wait_for("the server to have all that passed", lambda: received[0] == 6 + after_bytes)
        wait_for("both sides to end", lambda: proxy.num_connections == 0)
        assert [(fired.kind, fired.target) for fired in proxy.fired] == [("cut", "echo")]
        with connect(proxy) as again:
            assert echo(again, b"after") == b"after"


def test_a_cut_in_the_replies_lets_so_much_of_them_through() -> None:
    with proxied_echo() as (proxy, _), connect(proxy) as connection:
        armed = proxy.arm(Cut(10, Direction.REPLIES))
        connection.sendall(bytes(100))
        armed.wait(HANG_S)
        assert read(connection, 100) == bytes(10)


def test_a_delay_and_a_drop_lose_nothing() -> None:
    with proxied_echo() as (proxy, _), connect(proxy) as connection:
        delayed = proxy.arm(Delay(0.05, after_bytes=2))
        dropped = proxy.arm(Drop(0.05, Direction.REPLIES, after_bytes=1))
        start = time.monotonic()
        assert echo(connection, b"12345") == b"12345"
        assert time.monotonic() - start >= 0.05
        delayed.wait(HANG_S)
        dropped.wait(HANG_S)
        assert (proxy.count("delay"), proxy.count("drop")) == (1, 1)


def test_a_partition_refuses_new_connections_and_holds_present_ones_until_it_heals() -> None:
    with proxied_echo() as (proxy, received), connect(proxy) as connection:
        assert echo(connection, b"x") == b"x"
        proxy.partition()
        connection.sendall(b"held")
        assert ends_at_once(proxy)
        assert received == [1]
        proxy.heal()
        assert read(connection, 4) == b"held"
        assert (proxy.count("partition"), proxy.count("refuse")) == (1, 1)


def test_a_partition_for_a_while_heals_by_itself() -> None:
    with proxied_echo() as (proxy, _), connect(proxy) as connection:
        armed = proxy.arm(Partition(seconds=0.05, after_bytes=2))
        assert echo(connection, b"held") == b"held"
        armed.wait(HANG_S)


def test_healing_forgets_what_has_not_happened() -> None:
    with proxied_echo() as (proxy, _), connect(proxy) as connection:
        proxy.arm(Cut(1))
        proxy.heal()
        assert echo(connection, b"12") == b"12"
        assert proxy.fired == []


def test_cutting_all_ends_every_connection() -> None:
    with proxied_echo() as (proxy, _), connect(proxy) as first, connect(proxy) as second:
        assert (echo(first, b"1"), echo(second, b"2")) == (b"1", b"2")
        proxy.cut_all()
        assert (read(first, 1), read(second, 1)) == (b"", b"")
        assert proxy.count("cut") == 2


def test_before_a_port_without_a_server_a_connection_ends_at_once() -> None:
    with FaultProxy("nobody", free_port()) as proxy:
        assert ends_at_once(proxy)


@contextlib.contextmanager
def grpc_echo() -> Iterator[tuple[int, list[bytes]]]:
    """A server that echoes messages of a unary and of a streaming call; yields its port and what it received."""
    received: list[bytes] = []

    def unary(request: bytes, context: grpc.ServicerContext) -> bytes:
        received.append(request)
        return request

    def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            received.append(request)
            yield request

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port, received
    finally:
        server.stop(None).wait(HANG_S)


def outgoing(messages: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (message := messages.get()) is not None:
        yield message


@contextlib.contextmanager
def echo_stream(channel: grpc.Channel) -> Iterator[tuple[queue.SimpleQueue[bytes | None], Iterator[bytes]]]:
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    try:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/test.Echo/Stream")
        yield messages, call(outgoing(messages), timeout=HANG_S)
    finally:
        messages.put(None)


def test_a_swallowed_answer_of_a_stream_arrives_as_a_request_and_not_as_a_reply() -> None:
    with grpc_echo() as (port, received), FaultProxy("echo", port) as proxy, grpc.insecure_channel(proxy.address) as channel:
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Unary")
        with echo_stream(channel) as (messages, replies):
            messages.put(b"one")
            assert next(replies) == b"one"
            armed = proxy.arm(Swallow())
            messages.put(b"two")
            with pytest.raises(grpc.RpcError):
                next(replies)
            armed.wait(HANG_S)
        assert received == [b"one", b"two"]
        assert proxy.count("swallow") == 1
        assert unary(b"three", timeout=HANG_S, wait_for_ready=True) == b"three"


def test_the_answer_of_a_unary_call_is_swallowed_only_if_asked_for() -> None:
    with grpc_echo() as (port, received), FaultProxy("echo", port) as proxy, grpc.insecure_channel(proxy.address) as channel:
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Unary")
        assert unary(b"one", timeout=HANG_S, wait_for_ready=True) == b"one"
        armed = proxy.arm(Swallow(calls="all"))
        with pytest.raises(grpc.RpcError):
            unary(b"two", timeout=HANG_S)
        armed.wait(HANG_S)
        assert received == [b"one", b"two"]


def test_swallowing_begins_with_an_answer_of_its_kind_and_ends_by_itself_when_no_other_comes() -> None:
    with grpc_echo() as (port, _), FaultProxy("echo", port) as proxy, grpc.insecure_channel(proxy.address) as channel:
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Unary")
        armed = proxy.arm(Swallow(answers=5, seconds=0.05))
        assert unary(b"one", timeout=HANG_S, wait_for_ready=True) == b"one"
        with echo_stream(channel) as (messages, replies):
            messages.put(b"two")
            with pytest.raises(grpc.RpcError):
                next(replies)
            armed.wait(HANG_S)
        assert [fired.detail for fired in proxy.fired] == ["1 answers"]
