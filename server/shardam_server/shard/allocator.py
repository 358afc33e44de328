"""Freed memory of large messages, kept for the next ones: the C library's own way is to give it back and take it again.

Every message of some MB is then a block of new pages, which the system has to clear: up to a third of a push's time.
"""

from __future__ import annotations

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Numbers of glibc's mallopt; once one is set, glibc does not adapt the other any more, so both are."""

MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Blocks from this size on still go back to the system at once; it is the largest that all releases of glibc take."""


def keep_freed_memory(keep_bytes: int) -> bool:
    """Has this process keep freed memory.

    Args:
        keep_bytes: what it keeps at most of each of its heaps; zero: what the C library keeps by itself.

    Returns:
        Whether it does: other C libraries than glibc know no such thing.
    """
    if not keep_bytes or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    done = [
        mallopt(option, value) for option, value in ((_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (_M_TRIM_THRESHOLD, keep_bytes))
    ]
    if not all(done):
        logger.warning("glibc's mallopt took not all of its options, so that large messages cost more time")
    return all(done)
