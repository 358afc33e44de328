"""A running `shardam demo`, watched with every process it starts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from shardam_testing.process_table import is_running
from shardam_testing.processes import clean_environment
from shardam_testing.waiting import wait_for

HANG_S = 240.0
"""A demo of these tests takes 10 to 25 s."""


class RunningDemo:
    """A demo whose two outputs go to files, and every process that it has started so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out = folder / "stdout"
        self.err = folder / "stderr"
        self.known: dict[int, psutil.Process] = {}
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.state_home = folder / "state"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shardam_server", "demo", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment(TMPDIR=str(self.temp), XDG_STATE_HOME=str(self.state_home)),
            )

    def note_descendants(self) -> list[psutil.Process]:
        """Returns the processes below the demo and remembers them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.known[process.pid] = process
        return self.alive()

    def alive(self) -> list[psutil.Process]:
        """Returns the remembered processes that run."""
        return [process for process in self.known.values() if process.is_running() and is_running(process.pid)]

    def running(self, *words: str) -> list[psutil.Process]:
        """Returns the descendants whose command line has all the words."""
        found = []
        for process in self.note_descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                if all(word in process.cmdline() for word in words):
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        """Returns the workers, without torchrun."""
        return [process for process in self.running("shardam.demo") if "torch.distributed.run" not in process.cmdline()]

    def wait_for_text(self, text: str) -> str:
        """Waits until stdout or stderr has the text and returns both."""

        def look() -> str | None:
            self.note_descendants()
            seen = self.out.read_text() + self.err.read_text()
            assert self.process.poll() is None or text in seen, seen
            return seen if text in seen else None

        return wait_for(f"{text!r} in the demo's output", look, HANG_S)

    def wait(self) -> int:
        """Waits for its end and returns the exit status."""

        def ended() -> bool:
            self.note_descendants()
            return self.process.poll() is not None

        wait_for("the demo to end", ended, HANG_S)
        return int(self.process.returncode)

    def assert_nothing_is_left(self) -> None:
        assert len(self.known) >= 4, "the test has not seen the demo's processes"
        wait_for("the demo's processes to end", lambda: not self.alive(), 60.0)

    def assert_temp_is_empty(self) -> None:
        assert list(self.temp.iterdir()) == []


@contextlib.contextmanager
def running_demo(folder: Path, *arguments: str) -> Iterator[RunningDemo]:
    """Starts a demo; whatever of it is left at the end is killed."""
    demo = RunningDemo(folder, *arguments)
    try:
        yield demo
    finally:
        demo.note_descendants()
        demo.process.kill()
        demo.process.wait()
        for process in demo.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def write_clicks(folder: Path) -> Path:
    """Writes a small file in which one field decides the label and the other is noise."""
    random = np.random.default_rng(0)
    lines = ["label,cat_site,cat_noise,dense_x"]
    for _ in range(2_000):
        site = int(random.integers(4))
        label = int(random.random() < (0.05, 0.3, 0.7, 0.95)[site])
        lines.append(f"{label},{2**53 + 1 + site},n{random.integers(20)},{random.normal():.3f}")
    path = folder / "clicks.csv"
    path.write_text("\n".join(lines) + "\n")
    return path
