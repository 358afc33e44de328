"""Limits of the wire that client and shard must agree on, and the gRPC channel options that follow from them."""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""Newest protocol version this package speaks."""

MIN_PROTOCOL_VERSION = 1
"""Oldest protocol version this package speaks."""

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message both ways; gRPC's own default of 4 MiB would refuse an ordinary push."""

MAX_PART_BYTES = 512 * 2**20
"""Ids and gradients of one part of a push at most. Parts above a chunk travel in chunks; a shard reserves the bytes of a whole
part before it takes the rest, and this is what it may reserve by default."""

MIN_CHUNK_BYTES = 2**16
"""Bytes of rows in one message of an answer in chunks at least: below, the cost of messages is most of an answer's."""

MAX_CHUNK_BYTES = 2**22
"""And at most: above, sender and receiver no longer overlap in an answer of ordinary size."""

CLIENT_ID_BYTES = 16
"""A client id is 128 random bits."""

MAX_SCAN_ROWS = 100_000
"""Rows of one scan page at most; MAX_MESSAGE_BYTES may allow fewer."""

KEEPALIVE_S = 30.0
"""An idle channel is probed this often, so that a half-open connection is noticed."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a company proxy must not capture traffic between shards
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),  # short against the waits of those who try again
)
"""Options of every client channel."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S * 1000 / 2)),  # allows what clients send
    ("grpc.http2.max_ping_strikes", 0),
)
"""Options of every shard's server; they allow the pings of CHANNEL_OPTIONS."""
