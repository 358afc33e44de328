"""Every Python and shell block of README.md runs, in order, as printed.

A comment before a block may say how: `<!-- test: dry run -->` (make is asked what it would do: the commands themselves are
what runs this test), `<!-- test: background until "TEXT" -->` (the block goes on while the later ones run; it is interrupted,
as by Ctrl-C, at the end). Ports are free ones, so 127.0.0.1:8080 is replaced by the admin API's address, and .venv/bin by the
folder of this interpreter; what is kept lies away from the user's own. Everything else is run as it stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shardam_testing.processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]

BLOCK = re.compile(r"(?:<!-- test: (?P<how>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)

BLOCK_TIMEOUT_S = 120
"""Hang guard; the slowest block takes a tenth of it."""


@dataclasses.dataclass(frozen=True)
class Block:
    how: str
    language: str
    code: str


def read_blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [Block(match["how"] or "", match["language"], match["code"]) for match in BLOCK.finditer(text)]


class Background:
    """A block that stays up, with what it has printed so far."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        self.output = ""
        self.process = subprocess.Popen(
            ["sh", "-c", f"exec {code}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + BLOCK_TIMEOUT_S
        while text not in self.output or not self.output.endswith("\n\n"):  # the banner ends with an empty line
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"{text!r} did not appear:\n{self.output}"
            time.sleep(0.05)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=60)
        self._reader.join(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclasses.dataclass
class Runner:
    """Runs blocks one after another, as a reader would in one folder with two shells."""

    stack: contextlib.ExitStack
    admin: str = "127.0.0.1:8080"
    background: Background | None = None
    environment: dict[str, str] = dataclasses.field(
        default_factory=lambda: clean_environment(SHARDAM_PORT="0", SHARDAM_ADMIN_PORT="0", PYTHONUNBUFFERED="1")
    )

    def run(self, block: Block) -> str:
        code = block.code.replace("127.0.0.1:8080", self.admin).replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        if block.language == "python":
            return self.finish([sys.executable, "-W", "error", "-c", code])
        if block.how == "dry run":
            return self.finish(["sh", "-ec", re.sub(r"^make ", "make --dry-run ", code, flags=re.MULTILINE)])
        if block.how:
            match = re.fullmatch(r'background until "(.+)"', block.how)
            assert match, f"unknown way to run a block: {block.how}"
            return self.start(code, match[1])
        return self.finish(["sh", "-ec", code])

    def finish(self, command: list[str]) -> str:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        assert result.returncode == 0, f"{command[-1]}\nended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def start(self, code: str, ready: str) -> str:
        background = Background(code, self.environment)
        self.stack.callback(background.close)
        background.wait_for(ready)
        exported = re.search(r"export SHARDAM_REDIS_URL=(\S+)", background.output)
        admin = re.search(r"http://(127\.0\.0\.1:\d+)", background.output)
        assert exported, background.output
        assert admin, background.output
        self.environment = {name: value for name, value in self.environment.items() if not name.startswith("SHARDAM_")}
        self.environment["SHARDAM_REDIS_URL"] = exported[1]
        self.admin = admin[1]
        self.background = background
        return background.output


@pytest.fixture
def runner() -> Iterator[Runner]:
    with contextlib.ExitStack() as stack:
        yield Runner(stack)


@pytest.mark.timeout(600)
def test_every_block_of_the_readme_runs_as_printed(runner: Runner) -> None:
    blocks = [block for block in read_blocks() if block.language in ("python", "sh")]
    outputs = [runner.run(block) for block in blocks]
    joined = "\n".join(outputs)
    assert "scripts/run_tests.py" in outputs[0], "the first block is the two commands"
    assert '"exp_avg_sq"' in joined, "the REST look-up shows a moment"
    assert "9007199254740993" in joined, "an id above 2**53 comes back digit for digit"
    assert "2 workers took 200 steps" in joined, "both workers' pushes are steps of the table"
    assert "2 workers in sync: 100 steps" in joined, "the workers' pushes are one step, and a killed worker comes back"
    assert runner.background is not None
    assert runner.background.interrupt() == 0, "Ctrl-C stops the cluster cleanly"


def test_blocks_are_in_languages_that_are_run_or_plain_text() -> None:
    blocks = read_blocks()
    assert {block.language for block in blocks} == {"text", "sh", "python"}
    assert len(blocks) == (ROOT / "README.md").read_text(encoding="utf-8").count("\n```") // 2


def test_the_program_of_the_readme_is_the_quickstart_example() -> None:
    program = next(block.code for block in read_blocks() if block.language == "python")
    assert program in (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"`([\w./-]+\.(?:md|py|toml|txt))`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
