"""Channel and server options fit each other."""

from __future__ import annotations

import pytest

from shardam_proto.limits import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS


@pytest.mark.case("C094")
def test_the_server_allows_the_pings_that_clients_send() -> None:
    channel, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == 1


def test_both_sides_take_the_same_largest_message_in_both_directions() -> None:
    for options in (dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)):
        assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES


@pytest.mark.case("C102")
def test_channels_ignore_proxy_variables() -> None:
    assert dict(CHANNEL_OPTIONS)["grpc.enable_http_proxy"] == 0
