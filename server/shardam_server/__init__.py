"""shardam's processes: shards, the admin API, and the command line that starts and supervises them.

Importing it loads nothing; the CPU shard, the admin API and the command line never import torch.
"""
