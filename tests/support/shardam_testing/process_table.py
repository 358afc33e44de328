"""Which processes run, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Returns whether the process runs; one that has ended and was not yet waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def processes_with(text: str) -> list[int]:
    """Returns the running processes whose environment or command line holds the text."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            content = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
        except (OSError, ProcessLookupError):
            continue
        if text.encode() in content and is_running(int(folder.name)):
            found.append(int(folder.name))
    return found
