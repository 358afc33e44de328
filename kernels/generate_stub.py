"""Writes the stub of the native module, _native.pyi; run after the bindings change, and by the drift test.

Usage: python kernels/generate_stub.py [OUT]   (OUT: default shardam_kernels/_native.pyi beside this file)
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

DEFAULT_OUT = Path(__file__).resolve().parent / "shardam_kernels" / "_native.pyi"


def stub_text() -> str:
    """Returns the stub of the module as it is built now."""
    module = importlib.import_module("shardam_kernels._native")
    generator = StubGen(module=module, quiet=True)
    generator.put(module)
    return str(generator.get())


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_OUT).write_text(stub_text(), encoding="utf-8")
