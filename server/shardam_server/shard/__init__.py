"""The shard process: tables, the order of changes, and the gRPC services in front of them."""
