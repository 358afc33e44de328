"""What client and shard agree on: messages, errors, schemas, routing, limits."""
