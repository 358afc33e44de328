"""`shardam demo` end to end: real shards, real workers under torchrun, the admin API, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from shardam_testing.processes import clean_environment
from shardam_testing.waiting import wait_for

HANG_S = 240.0
"""A demo of these tests takes 10 to 25 s."""

pytestmark = pytest.mark.timeout(2 * HANG_S)


class RunningDemo:
    """A demo whose two outputs go to files, and every process that it has started so far."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out = folder / "stdout"
        self.err = folder / "stderr"
        self.known: dict[int, psutil.Process] = {}
        self.temp = folder / "temp"
        self.temp.mkdir()
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shardam_server", "demo", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment(TMPDIR=str(self.temp)),
            )

    def note_descendants(self) -> list[psutil.Process]:
        """Returns the processes below the demo and remembers them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.known[process.pid] = process
        return self.alive()

    def alive(self) -> list[psutil.Process]:
        """Returns the remembered processes that run."""
        return [process for process in self.known.values() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

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
        assert list(self.temp.glob("shardam-demo-*")) == []


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


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """A small file in which one field decides the label and the other is noise."""
    random = np.random.default_rng(0)
    lines = ["label,cat_site,cat_noise,dense_x"]
    for _ in range(2_000):
        site = int(random.integers(4))
        label = int(random.random() < (0.05, 0.3, 0.7, 0.95)[site])
        lines.append(f"{label},{2**53 + 1 + site},n{random.integers(20)},{random.normal():.3f}")
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def get_json(url: str) -> dict[str, object]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as response:
        content: dict[str, object] = json.load(response)
        return content


def test_the_synthetic_demo_ends_with_one_json_object_of_its_figures(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--data", "synthetic", "--epochs", "1", "--json") as demo:
        assert demo.wait() == 0, demo.err.read_text()
        demo.assert_nothing_is_left()
        demo.assert_temp_is_empty()
        lines = demo.out.read_text().splitlines()
        people = demo.err.read_text()
    result = json.loads(lines[-1])
    assert list(result) == [
        "auc",
        "log_loss",
        "samples_per_s",
        "baseline_auc",
        "baseline_log_loss",
        "baseline_samples_per_s",
        "workers",
        "shards",
        "rows",
    ]
    assert len(lines) == 1
    assert result["workers"] == result["shards"] == 2
    assert result["rows"] > 1_000
    assert 0.6 < result["baseline_auc"] < 0.9
    assert abs(result["auc"] - result["baseline_auc"]) < 0.05  # one epoch: shardam's tables have taken twice the steps
    assert 0.0 < result["log_loss"] < 0.7
    assert result["samples_per_s"] > 0
    assert people.startswith("shardam demo: synthetic click data, seed 0")
    assert "weight now" in people
    assert "exp_avg_sq" in people
    assert "Traceback" not in people


def test_keep_leaves_urls_that_work_until_ctrl_c(tmp_path: Path, clicks: Path) -> None:
    arguments = ("--data", str(clicks), "--epochs", "2", "--workers", "1", "--shards", "3", "--keep")
    with running_demo(tmp_path, *arguments) as demo:
        text = demo.wait_for_text("export SHARDAM_REDIS_URL=redis://")
        words = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith("  ")}
        assert len(text.splitlines()) < 40
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for name in ("page", "API"):
            with opener.open(words[name], timeout=30) as response:
                assert response.status == 200
        row = get_json(words["this"])
        assert row["id"] in {str(2**53 + 1 + site) for site in range(4)}
        assert row["found"] is True
        optimizer = row["optimizer"]
        assert isinstance(optimizer, dict)
        assert optimizer["step"] == 6  # 1,800 training samples are 3 batches of 512, in 2 epochs
        assert any(value != 0 for value in optimizer["exp_avg"])
        cluster = subprocess.run(
            [sys.executable, "-m", "shardam_server", "status", "--redis", words["connect"].partition("=")[2]],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert cluster.returncode == 0, cluster.stderr
        demo.process.send_signal(signal.SIGINT)
        assert demo.wait() == 0, demo.err.read_text()
        demo.assert_nothing_is_left()
        demo.assert_temp_is_empty()
        assert "Traceback" not in demo.out.read_text() + demo.err.read_text()


@pytest.mark.parametrize(
    ("moment", "number", "status"), [("\n    1 ", signal.SIGINT, 130), ("training and", signal.SIGTERM, 143)]
)
def test_a_signal_stops_everything_without_a_traceback(
    tmp_path: Path, clicks: Path, moment: str, number: signal.Signals, status: int
) -> None:
    with running_demo(tmp_path, "--data", str(clicks), "--epochs", "1000") as demo:
        demo.wait_for_text(moment)
        wait_for("processes of the cluster", lambda: len(demo.note_descendants()) >= 4, HANG_S)
        demo.process.send_signal(number)
        assert demo.wait() == status
        demo.assert_nothing_is_left()
        demo.assert_temp_is_empty()
        text = demo.out.read_text() + demo.err.read_text()
        assert "Traceback" not in text
        assert "stopped; nothing of the demo is left running" in text


def test_a_killed_demo_leaves_no_process(tmp_path: Path, clicks: Path) -> None:
    with running_demo(tmp_path, "--data", str(clicks), "--epochs", "1000", "--workers", "1") as demo:
        demo.wait_for_text("\n    1 ")
        demo.note_descendants()
        demo.process.kill()
        demo.process.wait()
        demo.assert_nothing_is_left()


def test_a_killed_worker_ends_the_demo_with_one_error(tmp_path: Path, clicks: Path) -> None:
    with running_demo(tmp_path, "--data", str(clicks), "--epochs", "1000", "--shards", "1") as demo:
        demo.wait_for_text("\n    1 ")
        demo.workers()[-1].kill()
        assert demo.wait() == 1
        demo.assert_nothing_is_left()
        error = demo.err.read_text()
        assert error.count("shardam: demo: ") == 1
        assert "SIGKILL" in error  # torchrun's finding


def test_a_killed_shard_ends_the_demo_with_the_client_s_error(tmp_path: Path, clicks: Path) -> None:
    with running_demo(tmp_path, "--data", str(clicks), "--epochs", "1000", "--workers", "1") as demo:
        demo.wait_for_text("\n    1 ")
        demo.running("shard")[0].kill()
        assert demo.wait() == 1
        demo.assert_nothing_is_left()
        error = demo.err.read_text()
        assert "shardam: demo: worker" in error
        assert "lost" in error
        assert "Traceback" not in error


def test_a_bad_file_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("label,price\n1,2\n")
    run = subprocess.run(
        [sys.executable, "-m", "shardam_server", "demo", "--data", str(path)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith(f"shardam: {path}, line 1: unknown column 'price'; the file needs")
