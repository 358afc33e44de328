"""What the compiler makes of every GPU kernel: only float32 arithmetic that is rounded by itself, no spills, wide accesses.

The interpreter cannot see a contraction, an approximation or a flushed denormal; the PTX can (CONTRACT.md, Gates). No GPU and
no driver is needed. The run's summary has the registers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shardam_testing.kernel_cover import PARAMETERS
from shardam_testing.ptx import Compiled, compile_kernel

from shardam_kernels.layout import Layout, layout
from shardam_kernels.triton.adam_kernel import adam_update_kernel
from shardam_kernels.triton.row_kernels import clear_rows_kernel, read_rows_kernel, write_rows_kernel
from shardam_kernels.triton.tiles import Tile, long_run_tile, row_tile
from shardam_kernels.triton.weights import DTYPE_CODES

ARCHS = [80, 90, 100]
DTYPES = list(DTYPE_CODES)
DIMS = PARAMETERS["dim"]
DECAYS = {"no decay": 0, "coupled": 1, "decoupled": 2}

# On sm_100 some come two at a time (f32x2); each of the two is rounded by itself.
ARITHMETIC = re.compile(r"(?:add|sub|mul)\.rn\.f32(?:x2)?|(?:div|sqrt)\.rn\.f32|(?:neg|abs|min|max)\.f32")
BESIDE = re.compile(
    r"cvt(?:\.(?:rn|rzi))?(?:\.[a-z]\d+)?\.(?:b?f16|f32|[su]\d+)|selp\.f32|setp\.[a-z]+(?:\.[a-z]+)?\.f32|mov\.[bf]\d+"
)

POINTERS = {
    "gradients": "*fp32",
    "starts": "*i32",
    "distances": "*i64",
    "step_factors": "*fp32",
    "streams": "*i64",
    "narrow_base": "*i16",
    "base": "*fp32",
    "saturated": "*i64",
    "out": "*fp32",
    "values": "*fp32",
}
SCALARS = dict.fromkeys(("c1", "c2", "d", "eps", "weight_decay", "unscale", "divisor"), "fp32")
COUNTS = dict.fromkeys(("sign_flip", "first_row", "end_row", "num_rows"), "i32")


def _tiles(dim: int) -> list[Tile]:
    return [row_tile(dim, interpreted=False), long_run_tile(dim, interpreted=False)]


def _signature(kernel: object, constants: dict[str, object]) -> dict[str, str]:
    known = POINTERS | SCALARS | COUNTS
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]  # triton has no stubs
    return {name: known[name] for name in names if name not in constants}


def _update(record: Layout, tile: Tile, decay: int, mean: bool, arch: int, folder: Path) -> Compiled:
    constants: dict[str, object] = {
        "DIM": record.dim,
        "BLOCK": tile.block,
        "ROWS": tile.rows,
        "UNROLL": tile.unroll,
        "EXP_AVG": record.component("exp_avg").offset_bytes // 4,
        "EXP_AVG_SQ": record.component("exp_avg_sq").offset_bytes // 4,
        "DTYPE": DTYPE_CODES[record.dtype],
        "DECAY": decay,
        "MEAN": mean,
    }
    signature = _signature(adam_update_kernel, constants)
    return compile_kernel(adam_update_kernel, signature, constants, arch, tile, folder)


@pytest.fixture
def note_registers(record_property: Callable[[str, object], None]) -> Iterator[list[int]]:
    """A list of registers per thread, of which the summary shows number and range."""
    registers: list[int] = []
    yield registers
    if registers:
        record_property("summary", f"{len(registers)} kernels, {min(registers)} to {max(registers)} registers, no spills")


def _check(compiled: Compiled, label: str) -> None:
    unknown = {name for name in compiled.float_instructions() if not (ARITHMETIC.fullmatch(name) or BESIDE.fullmatch(name))}
    unknown -= {name for name in unknown if re.match(r"(?:ld|st)\.", name)}
    assert not unknown, f"{label}: not rounded by itself, or unknown: {sorted(unknown)}"
    assert not [name for name in compiled.instructions() if "fma" in name or ".approx" in name or ".ftz" in name]
    assert compiled.spilled_bytes == 0, label


def _check_width(compiled: Compiled, record: Layout, label: str) -> None:
    """Every access but one value a row is 16 bytes wide, and 8 for weights of two bytes, of which a thread has four."""
    accesses = compiled.global_accesses()
    stores = [size for kind, size in accesses if kind == "st"]
    narrowest = 16 if record.dtype == "float32" else 8
    assert min(stores) >= narrowest, f"{label}: stores of {sorted(set(stores))} bytes"
    wide_loads = [size for kind, size in accesses if kind == "ld" and size > 8]
    assert set(wide_loads) == {16}, f"{label}: loads of {sorted(set(wide_loads))} bytes"
    assert len(wide_loads) >= 3 + (record.dtype == "float32"), f"{label}: {accesses}"  # gradient, moments, weight


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_of_the_update_is_rounded_operation_by_operation(
    dtype: str, arch: int, tmp_path: Path, note_registers: list[int]
) -> None:
    record = layout(64, dtype)
    for (name, decay), mean, tile in itertools.product(DECAYS.items(), [False, True], _tiles(64)):
        label = f"update sm_{arch} {dtype} dim 64 {name} mean={mean} rows={tile.rows}"
        compiled = _update(record, tile, decay, mean, arch, tmp_path)
        _check(compiled, label)
        note_registers.append(compiled.registers)
        _check_width(compiled, record, label)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_dim_spills_and_rows_of_whole_vectors_move_16_bytes_at_a_time(
    dtype: str, arch: int, tmp_path: Path, note_registers: list[int]
) -> None:
    for place, dim in enumerate([*DIMS, 4, 12, 1000]):
        record = layout(int(str(dim)), dtype)
        tile = _tiles(record.dim)[place % 2]
        label = f"update sm_{arch} {dtype} dim {dim} rows={tile.rows}"
        compiled = _update(record, tile, 2, True, arch, tmp_path)
        _check(compiled, label)
        note_registers.append(compiled.registers)
        if record.dim % 4 == 0:
            _check_width(compiled, record, label)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", [3, 64, 128])
def test_rows_are_read_written_and_cleared_in_whole_vectors_without_spills(
    dim: int, arch: int, tmp_path: Path, note_registers: list[int]
) -> None:
    for kernel, dtype in itertools.product((read_rows_kernel, write_rows_kernel, clear_rows_kernel), DTYPES):
        record = layout(dim, dtype)
        clears = kernel is clear_rows_kernel
        columns = record.stride_bytes // 4 if clears else dim
        tile = row_tile(columns, interpreted=False)
        constants: dict[str, object] = {"BLOCK": tile.block, "ROWS": tile.rows}
        constants |= {"STRIDE": columns} if clears else {"DIM": dim, "OFFSET": 0, "DTYPE": DTYPE_CODES[dtype]}
        signature = _signature(kernel, constants)
        compiled = compile_kernel(kernel, signature, constants, arch, tile, tmp_path)
        label = f"{kernel.__name__} sm_{arch} {dtype} dim {dim}"
        _check(compiled, label)
        note_registers.append(compiled.registers)
        if dim % 4 == 0:
            stores = [size for kind, size in compiled.global_accesses() if kind == "st"]
            narrow_store = dtype != "float32" and kernel is write_rows_kernel
            assert set(stores) == {8 if narrow_store else 16}, label


def test_the_gate_sees_a_contraction_an_approximation_and_a_narrow_access() -> None:
    bad = Compiled(
        "\tfma.rn.f32 %r1, %r2;\n\t@%p1 ex2.approx.ftz.f32 %f1, %f2;\n\tatom.global.add.f32 %f1, [%rd1], %f2;\n", 1, 0
    )
    assert bad.float_instructions() == {"fma.rn.f32", "ex2.approx.ftz.f32", "atom.global.add.f32"}
    with pytest.raises(AssertionError, match=r"atom\.global\.add\.f32"):
        _check(bad, "bad")
    good = Compiled("\t@%p1 ld.global.v4.b32 { %r1, %r2 }, [ %rd1 + 0 ];\n\tst.global.b16 [ %rd2 ], %rs1;\n", 1, 0)
    assert good.global_accesses() == [("ld", 16), ("st", 2)]
