import torch, shardam

with shardam.LocalCluster(shards=2) as cluster:               # or shardam.connect("redis://host:6379/0", cluster="prod")
    items = shardam.Embedding(None, 16, table="items", cluster=cluster)      # torch's argument order; None = any int64 id
    head = torch.nn.Linear(16, 1)
    sparse = shardam.SparseAdam([items], lr=1e-2)             # a torch.optim.Optimizer
    dense = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(100):
        ids = torch.randint(0, 10**12, (256,))
        loss = torch.nn.functional.mse_loss(head(items(ids)).squeeze(1), (ids % 7).float())
        loss.backward()
        sparse.step(); dense.step(); sparse.zero_grad(); dense.zero_grad()
    print(cluster.table("items").rows(ids[:3]))               # weight, exp_avg, exp_avg_sq, step, found
