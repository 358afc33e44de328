"""A process whose Triton kernels run in the interpreter: runs cases of the cover and prints what it saw.

Usage: TRITON_INTERPRET=1 python -m shardam_testing.triton_worker   (numbers of cases on standard input, a line each)

Answers each number with one line of JSON: the list of (what, digest), or the text of an exception.
"""

from __future__ import annotations

import json
import sys
import time

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
        start = time.monotonic()
        seen = run_case(case, TritonTable(case.dim, NUM_SLOTS, case.dtype))
        print(json.dumps({"seen": seen, "seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()
