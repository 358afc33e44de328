"""Home, shards and workers of one sync group over a network that loses, reorders and repeats messages.

Shards are the product's own: their states, journals, replay and groups. What carries messages between them and decides when
something happens is a small model of services, home and client, written to be read beside PROTOCOL.md, section 5.
"""
