"""What `shardam demo` prints, and how its child processes are heard and stopped."""

import io
import queue
import sys
from pathlib import Path

import pytest
from rich.console import Console

from shardam_server.demo_processes import Child, Exited, Happening, Line, child_environment
from shardam_server.demo_report import DataSummary, DemoReport, EpochResult, MovedRow, StepTimes, Training
from shardam_server.demo_rest import RowState, row_url


def printed(terminal: bool) -> str:
    file = io.StringIO()
    with DemoReport(Console(file=file, force_terminal=terminal, width=60, color_system=None)) as report:
        report.data(DataSummary("made-up clicks [v1]", "nothing else is there", ("note",), ("user", "item"), 9_000, 1_000))
        report.started(["cpu", "cpu"], 1, "sync", "http://127.0.0.1:1")
        report.progress("shardam", 1, 512, 9_000)
        report.epoch(EpochResult(1, 0.75, 0.5, 12_345.6, 0.751, 0.501, 23_456.7))
        last = EpochResult(2, 0.76, 0.49, 12_345.6, 0.758, 0.491, 23_456.7)
        report.epoch(last)
        report.result(last, Training("sync", 2, 1, 4_321, batch_size=512, steps=34, table_steps=34))
        state = RowState([0.25] * 16, [0.001] * 16, [1e-6] * 16, 1_760)
        report.moved(
            MovedRow("item", "-5", "A [bold] Film", 77, [0.5] * 16, state, "http://127.0.0.1:1/v1/tables/item/rows/-5")
        )
    return file.getvalue()


def test_without_a_terminal_the_report_is_plain_lines_without_a_bar() -> None:
    text = printed(terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    assert text.splitlines()[0] == "shardam demo: made-up clicks [v1], because nothing else is there"
    assert "\nepoch   shardam   local   shardam   local   shardam     local\n" in text
    assert "\n    2    0.7600  0.7580    0.4900  0.4910    12,346    23,457\n" in text
    assert "AUC 0.7600, local baseline 0.7580 (+0.0020); 4,321 rows on 1 shard." in text
    assert "starting 1 worker (cpu), mode sync" in text
    assert "41.5 ms a step of 512 samples; 21.8 ms locally." in text
    assert "Row -5 of table item (A [bold] Film), in 77 training samples, read back by" in text
    assert "  weight before  0.50000  0.50000" in text
    assert "  weight now     0.25000" in text
    assert "1,760" in text


def test_on_a_terminal_a_bar_moves_and_the_cursor_comes_back() -> None:
    text = printed(terminal=True)
    assert "epoch 1, shardam" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    ("training", "meaning"),
    [
        (
            Training("sync", 3, 2, 10, 510, steps=1_000, table_steps=1_000),
            "Mode sync: the group took 1,000 steps, each the mean of K = 3 contributions and one SparseAdam step of a table "
            "(1,000), as in one process with the whole batch.",
        ),
        (
            Training("async", 1, 2, 10, 512, steps=100, table_steps=100),
            "Mode async: pushes are applied on arrival; a table took 100 SparseAdam steps, one for each push of 1 worker with "
            "100 steps, the baseline 100.",
        ),
        (
            Training("bounded:1", 2, 2, 10, 512, steps=100, table_steps=200),
            "Mode bounded:1: as async, a table took 200 SparseAdam steps, one for each push; a worker that was more than 1 "
            "step ahead of another waited with its next pull.",
        ),
    ],
)
def test_the_mode_is_said_with_what_it_meant(training: Training, meaning: str) -> None:
    assert training.meaning() == meaning


def next_steps() -> str:
    file = io.StringIO()
    with DemoReport(Console(file=file, width=60, color_system=None)) as report:
        report.next_steps()
    return file.getvalue()


def test_the_next_commands_work_as_printed_without_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    assert "`.venv/bin/python -m shardam_server demo --keep`" in next_steps()
    (scripts / "shardam").touch()
    assert next_steps() == "\nNext: `.venv/bin/shardam demo --keep` leaves all up to look at.\n"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "quickstart.py").touch()
    assert "`.venv/bin/python examples/quickstart.py` is the smallest program" in next_steps()
    monkeypatch.chdir(scripts)
    assert "`./shardam demo --keep`" in next_steps()
    monkeypatch.chdir(tmp_path / "examples")
    assert f"`{scripts}/shardam demo --keep`" in next_steps()


def test_the_url_of_a_row_quotes_the_table_and_keeps_the_id_s_digits() -> None:
    assert row_url("http://h:1", "cat_0", "-9223372036854775808") == "http://h:1/v1/tables/cat_0/rows/-9223372036854775808"


def test_children_do_not_inherit_the_user_s_own_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_CLUSTER", "prod")
    monkeypatch.setenv("OTHER", "1")
    environment = child_environment({"SHARDAM_REDIS_URL": "redis://x"})
    assert "SHARDAM_CLUSTER" not in environment
    assert environment["SHARDAM_REDIS_URL"] == "redis://x"
    assert environment["OTHER"] == "1"


def start(program: str) -> tuple[Child, queue.SimpleQueue[Happening]]:
    happenings: queue.SimpleQueue[Happening] = queue.SimpleQueue()
    return Child("child", [sys.executable, "-c", program], child_environment({}), happenings), happenings


def test_a_child_s_lines_come_before_its_end_and_its_stderr_is_kept() -> None:
    child, happenings = start("import sys; print('one'); print('two'); sys.stderr.write('why\\n'); sys.exit(3)")
    seen = [happenings.get(timeout=60) for _ in range(3)]
    assert seen == [Line("child", "one"), Line("child", "two"), Exited("child", 3)]
    assert child.tail() == ["why"]
    child.stop(10.0)


def test_a_child_is_stopped_by_the_end_of_its_stdin() -> None:
    child, happenings = start("import sys; print('up', flush=True); sys.stdin.read(); print('drained')")
    assert happenings.get(timeout=60) == Line("child", "up")
    child.stop(120.0)
    assert happenings.get(timeout=60) == Line("child", "drained")
    assert happenings.get(timeout=60) == Exited("child", 0)


def test_a_child_that_does_not_listen_is_killed() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
    child, happenings = start(program)
    assert happenings.get(timeout=60) == Line("child", "up")
    child.stop(0.4)
    assert happenings.get(timeout=60) == Exited("child", -9)


def test_the_phases_of_a_step_stand_two_a_line_in_milliseconds() -> None:
    times = StepTimes(steps=10, total_s={"unique": 0.01, "wire": 0.25, "step": 1.0})
    assert list(times.lines()) == ["  unique        1.00 ms     wire         25.00 ms", "  step        100.00 ms"]
