"""Random Exchange messages, whole and broken, for the codec alone and for a shard: what protobuf reads is what must be read."""
