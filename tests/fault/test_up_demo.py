"""`shardam demo` stopped, killed, or robbed of a worker or a shard: one error, and no process left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from shardam_testing.demos import HANG_S, running_demo, write_clicks
from shardam_testing.waiting import wait_for

pytestmark = pytest.mark.timeout(2 * HANG_S)


@pytest.mark.parametrize(
    ("moment", "number", "status"), [("\n    1 ", signal.SIGINT, 130), ("training and", signal.SIGTERM, 143)]
)
def test_a_signal_stops_everything_without_a_traceback(
    tmp_path: Path, moment: str, number: signal.Signals, status: int
) -> None:
    with running_demo(tmp_path, "--data", str(write_clicks(tmp_path)), "--epochs", "1000") as demo:
        demo.wait_for_text(moment)
        wait_for("processes of the cluster", lambda: len(demo.note_descendants()) >= 4, HANG_S)
        demo.process.send_signal(number)
        assert demo.wait() == status
        demo.assert_nothing_is_left()
        demo.assert_temp_is_empty()
        text = demo.out.read_text() + demo.err.read_text()
        assert "Traceback" not in text
        assert "stopped; nothing of the demo is left running" in text


def test_a_killed_demo_leaves_no_process(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--data", str(write_clicks(tmp_path)), "--epochs", "1000", "--workers", "1") as demo:
        demo.wait_for_text("\n    1 ")
        demo.note_descendants()
        demo.process.kill()
        demo.process.wait()
        demo.assert_nothing_is_left()


def test_a_killed_worker_ends_the_demo_with_one_error(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--data", str(write_clicks(tmp_path)), "--epochs", "1000", "--shards", "1") as demo:
        demo.wait_for_text("\n    1 ")
        demo.workers()[-1].kill()
        assert demo.wait() == 1
        demo.assert_nothing_is_left()
        error = demo.err.read_text()
        assert error.count("shardam: demo: ") == 1
        assert "SIGKILL" in error  # torchrun's finding


def test_a_killed_shard_ends_the_demo_with_the_client_s_error(tmp_path: Path) -> None:
    with running_demo(tmp_path, "--data", str(write_clicks(tmp_path)), "--epochs", "1000", "--workers", "1") as demo:
        demo.wait_for_text("\n    1 ")
        demo.running("shard")[0].kill()
        assert demo.wait() == 1
        demo.assert_nothing_is_left()
        error = demo.err.read_text()
        assert "shardam: demo: worker" in error
        assert "lost" in error
        assert "Traceback" not in error
