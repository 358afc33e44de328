"""What several test stages share: real processes, a raw gRPC client, waiting with a deadline."""
