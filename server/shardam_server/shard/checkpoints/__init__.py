"""Checkpoints: cut on all shards at once, written beside changes, loaded by any number of shards."""
