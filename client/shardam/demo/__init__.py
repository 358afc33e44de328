"""The demo's data, model and workers: a click model trained on shards, beside the same model trained locally.

`shardam demo` starts it: first `python -m shardam.demo.prepare` (data to a file, no torch), then the workers,
`python -m torch.distributed.run ... -m shardam.demo`. Both talk to the command line in JSON lines on stdout
(`events.py`) and print nothing for people.
"""
