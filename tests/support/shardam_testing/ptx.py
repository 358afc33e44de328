"""Compiles the GPU kernels without a GPU and reads what the compiler made of them; imports triton."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from shardam_kernels.triton.tiles import Tile

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:[.:]+[a-zA-Z0-9_]+)*)[^;{]*;", re.MULTILINE)
_FLOAT = re.compile(r"\.(?:b?f16|f32|f64|tf32|e4m3|e5m2)")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU.

    Attributes:
        ptx: its text.
        registers: of one thread.
        spilled_bytes: stores and loads of registers that did not fit.
    """

    ptx: str
    registers: int
    spilled_bytes: int

    def instructions(self) -> list[str]:
        """Returns all mnemonics with their modifiers, such as "add.rn.f32"."""
        return _INSTRUCTION.findall(self.ptx)

    def float_instructions(self) -> set[str]:
        """Returns the mnemonics of those that name a floating-point type."""
        return {mnemonic for mnemonic in self.instructions() if _FLOAT.search(mnemonic)}

    def global_accesses(self) -> list[tuple[str, int]]:
        """Returns ("ld" or "st", bytes) of every access to global memory."""
        found = re.findall(r"\b(ld|st)\.global(?:\.[a-z_:0-9]+)*?(?:\.v(\d))?\.[a-z](\d+)\s", self.ptx)
        return [(kind, int(count or 1) * int(bits) // 8) for kind, count, bits in found]


def compile_kernel(
    kernel: triton.JITFunction,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    arch: int,
    tile: Tile,
    folder: Path,
) -> Compiled:
    """Compiles a kernel as its launcher would, for arguments that are all aligned to 16 bytes.

    Args:
        kernel: the kernel.
        signature: Triton types of the arguments, in order.
        constants: values of the constexpr parameters.
        arch: compute capability, such as 90.
        tile: whose options are the compiler's.
        folder: for the assembler's input.
    """
    types = dict(signature) | dict.fromkeys(constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(kernel, types, constexprs=dict(constants), attrs=aligned)
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=tile.options()).asm["ptx"]
    path = folder / "kernel.ptx"
    path.write_text(ptx, encoding="utf-8")
    report = subprocess.run(
        [get_ptxas(arch).path, "-v", "--fmad=false", "--gpu-name", sm_arch_from_capability(arch), str(path), "-o", "/dev/null"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stderr
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None, report
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
    return Compiled(ptx, int(registers[1]), spilled)
