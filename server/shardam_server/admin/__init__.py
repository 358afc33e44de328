"""The admin API: a stateless HTTP front that shows the cluster, its tables, rows and optimizer state.

It asks shards over gRPC and Redis for names and addresses; it holds no rows and never imports torch.
"""
