"""A shard's changes and base on its disk: written before they are answered, replayed when it comes back (PROTOCOL.md, 7)."""
