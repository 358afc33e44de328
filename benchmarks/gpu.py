"""The GPU kernels on a GPU: correctness on the device, then bandwidth, then torch's SparseAdam beside them.

Usage: python benchmarks/gpu.py [--rehearse]

A plain script: it needs numpy, torch and triton, reads the pure part of shardam_kernels from this checkout, and builds nothing.
It prints one JSON line a figure, as the other benchmarks do, the first within a minute, and takes at most 4 minutes. A share of
copy bandwidth counts the bytes that must move: each record's components, gradients and indexes once each way.

Where the built package can be imported, a second leg follows: a shard end to end (gpu_shard.py).

Without a GPU it prints the bytes of each row and the time they should take on an H200, and ends with 2. With --rehearse it runs
tiny sizes on the CPU in Triton's interpreter; its figures mean nothing.

Exit status: 0 goals met, 1 missed, 2 no GPU, 4 wrong bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

import numpy as np
import numpy.typing as npt
import torch
from frame import TOLERANCE, Figure, spread_of

from shardam_kernels import reference, triton
from shardam_kernels.factors import AdamOptions, Factors, factors
from shardam_kernels.gradients import Runs
from shardam_kernels.layout import Layout, layout
from shardam_kernels.row_steps import Rounding, RowSteps

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

BANDWIDTH_GOAL = 0.85
SPARSE_ADAM_GOAL = 10.0
ROUNDS = 20
EXPONENT = 1.05  # of the Zipf distribution of ids
ZIPF_PART = 16  # the batch of Zipf ids is smaller: a run is one chain of additions, and of 1M ids one id would have 80,000
H200_COPY_BYTES_PER_S = 4.0e12  # what a copy reaches of the 4.8 TB/s that the memory is built for
INDEX_BYTES = 8 + 4 + 4  # per row: distance, start of the run, step factor
EXIT_NO_GPU, EXIT_WRONG_BITS = 2, 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run: on a GPU, or in a rehearsal."""

    device: torch.device
    num_rows: int
    num_ids: int
    filler: torch.Tensor  # large
    rounds: int


def group(row_ids: Int64s) -> Runs:
    """Groups ids as native.group_gradients does, with NumPy, for gradients that are known to be finite."""
    distinct, group_of, counts = np.unique(row_ids, return_inverse=True, return_counts=True)
    by_length = np.argsort(counts, kind="stable")
    rank = np.empty_like(by_length)
    rank[by_length] = np.arange(by_length.size)
    order = np.argsort(rank[group_of], kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts[by_length])])
    return Runs(distinct[by_length], starts.astype(np.int32), order.astype(np.int32), np.empty(0, np.int64))


def zipf_ids(num_rows: int, count: int) -> Int64s:
    """Returns ids 0 to num_rows - 1, the frequent ones anywhere in the table."""
    rng = np.random.default_rng(0)
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -EXPONENT
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(count))
    return rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]


def seconds(sizes: Sizes, work: Callable[[], object]) -> float:
    """Returns the time of one call on the device."""
    if sizes.device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sizes.filler.zero_()  # a millisecond in which the host puts the work on the stream, and nothing of it stays in the caches
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def interleaved(sizes: Sizes, ours: Callable[[], object], peer: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Returns the times of rounds of both, after a warm-up that compiles."""
    for work in (ours, peer, ours, peer):
        work()
    times = [(seconds(sizes, ours), seconds(sizes, peer)) for _ in range(sizes.rounds)]
    return [our for our, _ in times], [peer_time for _, peer_time in times]


def make_records(record: Layout, num_rows: int, device: torch.device) -> triton.Records:
    """Returns records of rows that are zero."""
    arena = triton.Arena(record.stride_bytes, device)
    arena.reserve(num_rows)
    return triton.Records(arena, record)


def row_steps(record: Layout, step: Factors, row_ids: Int64s, t: int) -> RowSteps:
    """Returns the table's step for each row."""
    rounding = None if record.dtype == "float32" else Rounding(99, row_ids, np.full(row_ids.size, t))
    return RowSteps(step.step_factors(row_ids.size), rounding)


def check_bits(sizes: Sizes, record: Layout) -> bool:
    """Whether three steps with duplicates leave the reference's bytes on the device."""
    num_rows, rng = 200, np.random.default_rng(record.dim)
    records = make_records(record, num_rows, sizes.device)
    expected = reference.Records(reference.Arena(record.stride_bytes), record)
    expected.arena.reserve(num_rows)
    weights = rng.standard_normal((num_rows, record.dim)).astype(np.float32)
    triton.initialize(records, np.arange(num_rows), weights)
    reference.write_component(expected, "weight", np.arange(num_rows), weights)
    options = AdamOptions(0.1), AdamOptions(0.1, weight_decay=0.1), AdamOptions(0.1, (0.8, 0.9), 1e-6, 0.1, True, True)
    for t in (1, 2, 3):
        step = factors(options[t - 1], t, grad_scale=float(t), contributions=t)
        row_ids = np.concatenate([rng.integers(0, num_rows // 2, 300), np.full(60, 7)])  # a run that columns are split for
        magnitudes = 10.0 ** rng.integers(-22, 3, (row_ids.size, 1))  # squares of some are denormal
        gradients = (rng.standard_normal((row_ids.size, record.dim)) * magnitudes).astype(np.float32)
        runs, merged = group(row_ids), reference.merge_gradients(row_ids, gradients, step)
        staged = triton.stage_step(records, runs.row_ids, gradients, runs, row_steps(record, step, runs.row_ids, t))
        saturated = triton.adam_update(records, staged, step)
        count = reference.adam_update(
            expected, merged.row_ids, merged.gradients, step, row_steps(record, step, merged.row_ids, t)
        )
        actual = torch.stack([records.arena.view_record(slot) for slot in range(num_rows)]).cpu().numpy()
        if int(saturated) != count or not np.array_equal(actual, expected.arena.records):
            return False
    slots = np.array([3, -1, num_rows - 1, 3])
    out = np.empty((slots.size, record.dim), np.float32)
    reference.read_component(expected, "weight", slots, out)
    return np.array_equal(triton.gather_weights(records, slots).cpu().numpy(), out)


def copy_rate(sizes: Sizes) -> float:
    """Returns bytes read and written per second by a large copy."""
    target = torch.empty_like(sizes.filler)
    times, _ = interleaved(sizes, lambda: target.copy_(sizes.filler), lambda: None)
    return 2 * target.nbytes / statistics.median(times)


def bandwidth_figure(name: str, sizes: Sizes, row_bytes: int, work: Callable[[], object], copied: float) -> Figure:
    """Measures work on num_ids rows as a share of the copy's bandwidth."""
    times, _ = interleaved(sizes, work, lambda: None)
    rate = row_bytes * sizes.num_ids / statistics.median(times)
    return Figure(name, rate / 1e9, "GB/s", "copy", copied / 1e9, rate / copied, BANDWIDTH_GOAL, spread_of(times))


def gather_bytes(record: Layout) -> int:
    """Bytes that a gather must move per row: the distance, the weight, the float32 reply."""
    return 8 + record.dim * (2 if record.dtype != "float32" else 4) + record.dim * 4


def update_bytes(record: Layout) -> int:
    """Bytes that an update must move per row that is named once: components both ways, the gradient, the indexes."""
    weight = 2 if record.dtype != "float32" else 4
    return 2 * record.dim * (weight + 4 + 4) + record.dim * 4 + INDEX_BYTES + (8 if record.dtype != "float32" else 0)


def bandwidth(sizes: Sizes, record: Layout, copied: float) -> list[Figure]:
    """Measures gather and update of distinct rows anywhere in the table."""
    rng = np.random.default_rng(1)
    records = make_records(record, sizes.num_rows, sizes.device)
    row_ids = rng.permutation(sizes.num_rows)[: sizes.num_ids]
    gradients = rng.standard_normal((sizes.num_ids, record.dim), dtype=np.float32)
    step = factors(AdamOptions(), 10)
    runs = group(row_ids)
    staged = triton.stage_step(records, runs.row_ids, gradients, runs, row_steps(record, step, runs.row_ids, 10))
    distances = torch.from_numpy(records.arena.distances(row_ids)).to(sizes.device)
    out = torch.empty((sizes.num_ids, record.dim), device=sizes.device)
    component = record.component("weight")
    suffix = f"{record.dtype}-{record.dim}"
    return [
        bandwidth_figure(
            f"gather-{suffix}",
            sizes,
            gather_bytes(record),
            lambda: triton.read_rows(records, component, distances, out),
            copied,
        ),
        bandwidth_figure(
            f"update-{suffix}", sizes, update_bytes(record), lambda: triton.adam_update(records, staged, step), copied
        ),
    ]


def against_sparse_adam(name: str, sizes: Sizes, dim: int, row_ids: Int64s) -> Figure:
    """Measures a step with duplicates beside torch.optim.SparseAdam's on the same device."""
    record, step = layout(dim), factors(AdamOptions(), 10)
    records = make_records(record, sizes.num_rows, sizes.device)
    gradients = np.random.default_rng(2).standard_normal((row_ids.size, dim), dtype=np.float32)
    runs = group(row_ids)
    staged = triton.stage_step(records, runs.row_ids, gradients, runs, row_steps(record, step, runs.row_ids, 10))
    weight = torch.nn.Parameter(torch.zeros((sizes.num_rows, dim), device=sizes.device))
    optimizer = torch.optim.SparseAdam([weight])
    indices = torch.from_numpy(row_ids)[None].to(sizes.device)
    values = torch.from_numpy(gradients).to(sizes.device)
    weight.grad = torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)
    ours, peers = interleaved(sizes, lambda: triton.adam_update(records, staged, step), optimizer.step)
    value, peer_value = row_ids.size / statistics.median(ours), row_ids.size / statistics.median(peers)
    spread = spread_of([peer / our for our, peer in zip(ours, peers, strict=True)])
    return Figure(
        f"update-{name}-{dim}",
        value,
        "ids/s",
        "torch.optim.SparseAdam",
        peer_value,
        value / peer_value,
        SPARSE_ADAM_GOAL,
        spread,
    )


def predict() -> int:
    """Says what to expect where there is no GPU."""
    print("no CUDA device is visible; what must move per row, and the time of 1M rows at 85 % of an H200's copy bandwidth:")
    for dtype in ("float32", "bfloat16"):
        for dim in (64, 128):
            for name, size in (("gather", gather_bytes(layout(dim, dtype))), ("update", update_bytes(layout(dim, dtype)))):
                predicted_us = size * 1e6 / (BANDWIDTH_GOAL * H200_COPY_BYTES_PER_S) * 1e6
                print(f"{name}-{dtype}-{dim}: {size} bytes, {predicted_us:.0f} us")
    return EXIT_NO_GPU


def run(sizes: Sizes) -> int:
    """Runs all of it."""
    start = time.monotonic()
    figures: list[Figure] = []

    def show(figure: Figure) -> None:
        figures.append(figure)
        print(figure.json_line(), f"# {time.monotonic() - start:.0f} s", flush=True)

    copied = copy_rate(sizes)
    show(Figure("copy", copied / 1e9, "GB/s", "itself", copied / 1e9, 1.0, 1.0, 0.0))
    for dtype in ("float32", "bfloat16", "float16"):
        for dim in (3, 64, 513):
            if not check_bits(sizes, layout(dim, dtype)):
                print(f"wrong bits: {dtype}, dim {dim}")
                return EXIT_WRONG_BITS
    print(f"the device leaves the reference's bits # {time.monotonic() - start:.0f} s", flush=True)
    any_ids = np.random.default_rng(3).integers(0, sizes.num_rows, sizes.num_ids)
    for dim in (64, 128):
        for figure in bandwidth(sizes, layout(dim), copied):
            show(figure)
        for name, row_ids in (("any", any_ids), ("zipf", zipf_ids(sizes.num_rows, sizes.num_ids // ZIPF_PART))):
            show(against_sparse_adam(name, sizes, dim, row_ids))
    for figure in bandwidth(sizes, layout(64, "bfloat16"), copied):
        show(figure)
    return int(any(figure.ratio < TOLERANCE * figure.goal for figure in figures))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="GPU kernels against copy bandwidth and torch.optim.SparseAdam")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes in Triton's interpreter, on the CPU")
    if parser.parse_args().rehearse:
        status = run(Sizes(torch.device("cpu"), 2_000, 1_000, torch.ones(1 << 18), 2))
        return status if status == EXIT_WRONG_BITS else 0
    if not torch.cuda.is_available():
        return predict()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    device = torch.device("cuda:0")
    status = run(Sizes(device, 4_000_000, 1_000_000, torch.ones(1 << 30, device=device), ROUNDS))
    return status or second_leg()


def second_leg() -> int:
    """Runs a shard end to end, in a process of its own, if the package is built here."""
    if importlib.util.find_spec("shardam_kernels._native") is None or importlib.util.find_spec("shardam_server") is None:
        print("second leg left out: the package is not built here (pip install . builds it)", flush=True)
        return 0
    script = Path(__file__).resolve().parent / "gpu_shard.py"
    return subprocess.run([sys.executable, str(script), "--json", "--check"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
