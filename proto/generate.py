"""Generates shardam_proto/v1/*_pb2*.py and their stubs from the .proto files; run by `make proto` and by the drift test.

Usage: python proto/generate.py [OUT]   (OUT: root of the output, default this folder)
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes the generated modules below `out`.

    Raises:
        RuntimeError: protoc failed; its messages are on stderr.
    """
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("shardam_proto/v1/*.proto"))
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; see its messages above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
