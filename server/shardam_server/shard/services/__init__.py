"""gRPC fronts of a shard: they check headers, translate messages to values and back, and hold no state."""
