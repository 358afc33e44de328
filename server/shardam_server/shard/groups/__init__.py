"""Groups of workers: their members, their steps, and the parts of a step until it is decided (PROTOCOL.md, section 5)."""
