"""Features of several tables in one lookup: each step costs one pull and one push message per shard."""

from __future__ import annotations

import torch

import shardam


def main() -> None:
    with shardam.LocalCluster(shards=2) as cluster:
        users = shardam.Embedding(None, 8, table="users", cluster=cluster)
        items = shardam.Embedding(None, 8, table="items", cluster=cluster)
        genres = shardam.EmbeddingBag(100, 8, mode="mean", table="genres", cluster=cluster)
        features = shardam.EmbeddingCollection({"user": users, "clicked": items, "shown": items, "genres": genres})
        head = torch.nn.Linear(4 * 8, 1)
        sparse = shardam.SparseAdam(features, lr=1e-2)
        dense = torch.optim.Adam(head.parameters(), lr=1e-2)

        generator = torch.Generator().manual_seed(0)
        for step in range(100):
            ids = torch.randint(0, 1000, (256, 3), generator=generator)
            batch = {
                "user": ids[:, 0],
                "clicked": ids[:, 1],
                "shown": ids[:, 2],
                "genres": (torch.randint(0, 100, (512,), generator=generator), torch.arange(0, 512, 2)),  # values, offsets
            }
            rows = features(batch)  # name -> [256, 8]
            loss = torch.nn.functional.mse_loss(head(torch.cat(list(rows.values()), dim=1)).squeeze(1), (ids[:, 0] % 2).float())
            loss.backward()
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            if step % 25 == 24:
                print(f"step {step + 1}: loss {loss.item():.3f}")
        print({table.name: cluster.table(table.name).stats().num_rows for table in cluster.tables()})


if __name__ == "__main__":
    main()
