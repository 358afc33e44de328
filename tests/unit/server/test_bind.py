from __future__ import annotations

import socket

import pytest

from shardam_server.bind import check_bind, check_port_free, free_port, is_loopback, join_address, local_host, reachable_host
from shardam_server.command_errors import PortInUse, UsageError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, has_token=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_wider_bind_needs_a_token_or_insecure(host: str) -> None:
    with pytest.raises(UsageError, match=rf"--host {host} .*SHARDAM_TOKEN or --token-file.*--insecure"):
        check_bind(host, has_token=False, insecure=False)
    check_bind(host, has_token=True, insecure=False)
    check_bind(host, has_token=False, insecure=True)


def test_an_unknown_host_is_refused_with_its_flag() -> None:
    with pytest.raises(UsageError, match=r"--host no\.such\.host\.invalid is unknown"):
        check_bind("no.such.host.invalid", has_token=False, insecure=False)


@pytest.mark.case("C103")
@pytest.mark.parametrize("listener_host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_with_port_and_flag(listener_host: str) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((listener_host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"^port {port} is in use: choose another with --admin-port$"):
            check_port_free("127.0.0.1", port, "--admin-port")


def test_a_port_whose_last_connection_waits_to_expire_is_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server_side, _ = listener.accept()
            server_side.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    check_port_free("127.0.0.1", port, "--port")


def test_a_free_port_and_port_zero_pass() -> None:
    check_port_free("127.0.0.1", free_port("127.0.0.1"), "--port")
    check_port_free("127.0.0.1", 0, "--port")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1 is no address of this machine"):
        check_port_free("192.0.2.1", 7070, "--port")


def test_addresses_are_written_as_clients_need_them() -> None:
    assert join_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert join_address("::1", 1) == "[::1]:1"
    assert local_host("0.0.0.0") == "127.0.0.1"
    assert local_host("192.0.2.1") == "192.0.2.1"
    assert reachable_host("0.0.0.0") == socket.gethostname()
    assert reachable_host("127.0.0.1") == "127.0.0.1"
