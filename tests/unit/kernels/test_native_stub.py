"""The checked-in stub of the native module is what the built module makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[3] / "kernels"


def test_the_stub_is_the_one_that_the_built_module_makes(tmp_path: Path) -> None:
    out = tmp_path / "_native.pyi"
    subprocess.run([sys.executable, str(KERNELS / "generate_stub.py"), str(out)], check=True, timeout=60)
    checked_in = (KERNELS / "shardam_kernels" / "_native.pyi").read_text(encoding="utf-8")
    assert checked_in == out.read_text(encoding="utf-8"), "run: python kernels/generate_stub.py"
