"""A process whose Triton kernels run in the interpreter: runs cases of the cover and prints what it saw.

Usage: TRITON_INTERPRET=1 python -m shardam_testing.triton_worker   (numbers of cases on standard input, a line each)

Answers each number with one line of JSON, the list of (what, digest), and ends at an exception.
"""

from __future__ import annotations

import json
import sys

from shardam_kernels import triton
from shardam_testing.kernel_cover import NUM_SLOTS, cover, run_case
from shardam_testing.triton_table import TritonTable


def main() -> None:
    """Answers until the input ends."""
    if not triton.INTERPRETED:
        sys.exit("set TRITON_INTERPRET=1 in the environment of this process")
    cases = cover()
    for line in sys.stdin:
        case = cases[int(line)]
        seen = run_case(case, TritonTable(case.dim, NUM_SLOTS, case.dtype))
        sys.stdout.write(json.dumps({"seen": seen}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
