"""Faults as a product: a proxy that breaks connections, an injector that kills and stops processes and counts what fired, a
worker that notes every acknowledged number, and an oracle that replays a shard's journal in NumPy.
"""
