from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from shardam_testing.process_table import is_running
from shardam_testing.waiting import wait_for

from shardam_server.children import LAST_LINES, Child, ChildSpec, Console, describe_exit

HANG_S = 60.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_program(
    program: str, console: Console, hidden_lines: Sequence[str] = (), stdin: Callable[[], str] | None = None
) -> Child:
    """Runs a Python program as a child to its end."""
    command = [sys.executable, "-S", "-c", program]
    child = Child(ChildSpec("shard 0", lambda: command, os.environ, stdin, hidden_lines), console)

    async def work() -> None:
        child.start()
        assert await child.wait_for(HANG_S)

    asyncio.run(work())
    return child


def test_every_line_of_both_streams_is_passed_on_with_the_childs_name() -> None:
    output = io.StringIO()
    run_program(
        "import sys; print('one', flush=True); print('two', file=sys.stderr); print('no end', end='')", Console(output, "text")
    )
    assert sorted(output.getvalue().splitlines()) == ["[shard 0] no end", "[shard 0] one", "[shard 0] two"]


def test_names_are_coloured_on_a_terminal_only_and_not_against_the_users_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(terminal, "text")
    console.write("shard 0", "a")
    console.write("admin", "b")
    first, second = terminal.getvalue().splitlines()
    assert first.endswith("[shard 0]\x1b[0m a")
    assert first[:5] != second[:5]
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Console(plain, "text").write("shard 0", "a")
    assert plain.getvalue() == "[shard 0] a\n"


def test_json_lines_stay_as_they_are_and_others_become_json() -> None:
    output = io.StringIO()
    console = Console(output, "json")
    console.write("shard 0", '{"message": "hello"}')
    console.write("redis", 'ready, "really"')
    first, second = map(json.loads, output.getvalue().splitlines())
    assert first == {"message": "hello"}
    assert (second["logger"], second["message"]) == ("redis", 'ready, "really"')


def test_secrets_and_hidden_lines_are_not_passed_on() -> None:
    output = io.StringIO()
    program = "print('password hunter2'); print('WARNING of no use'); print('end')"
    child = run_program(program, Console(output, "text", ["hunter2"]), hidden_lines=["of no use"])
    assert output.getvalue() == "[shard 0] password ***\n[shard 0] end\n"
    assert list(child.last_lines)[-1] == "end"


def test_the_last_lines_are_kept_and_long_ones_are_cut_into_pieces() -> None:
    child = run_program("print('x' * 200_000); [print(i) for i in range(100)]", Console(io.StringIO(), "text"))
    assert list(child.last_lines) == [str(number) for number in range(100 - LAST_LINES, 100)]
    output = io.StringIO()
    run_program("print('x' * 200_000)", Console(output, "text"))
    assert len(output.getvalue().splitlines()) == 4


def test_output_that_is_no_text_does_not_stop_it() -> None:
    output = io.StringIO()
    run_program("import os; os.write(1, b'\\xff\\xfe\\nend\\n')", Console(output, "text"))
    assert output.getvalue().splitlines()[1] == "[shard 0] end"


def test_what_is_written_to_stdin_arrives_whole_and_ends() -> None:
    output = io.StringIO()
    run_program("import sys; print(sys.stdin.read().upper())", Console(output, "text"), stdin=lambda: "secret text")
    assert output.getvalue().splitlines()[0] == "[shard 0] SECRET TEXT"


def test_exits_are_worded() -> None:
    assert describe_exit(2) == "exited with status 2"
    assert describe_exit(-9) == "was killed by SIGKILL"


def test_a_child_has_a_session_of_its_own_so_that_ctrl_c_does_not_reach_it() -> None:
    output = io.StringIO()
    run_program("import os; print(os.getsid(0) == os.getpid())", Console(output, "text"))
    assert output.getvalue() == "[shard 0] True\n"


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import pathlib, sys, threading
from shardam_server.lifeline import watch_lifeline
stop = threading.Event()
assert watch_lifeline({callback}, grace_s={grace_s})
pathlib.Path(sys.argv[1]).touch()
stop.wait()
"""


@pytest.mark.parametrize(
    ("callback", "grace_s"),
    [("stop.set", 600), ("lambda: None", 0.05), ("lambda: 1 // 0", 0.05)],
    ids=["orderly", "hangs", "raises"],
)
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, callback: str, grace_s: float) -> None:
    mark = tmp_path / "watching"
    environment = {**os.environ, "SHARDAM_LIFELINE": "stdin"}
    command = [sys.executable, "-c", PARENT, CHILD.format(callback=callback, grace_s=grace_s), str(mark)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            wait_for("the child to watch", mark.exists)
        finally:
            parent.kill()
    wait_for("the child to end", lambda: not is_running(pid))


def test_without_the_variable_no_lifeline_is_watched() -> None:
    program = "from shardam_server.lifeline import watch_lifeline; print(watch_lifeline(lambda: None, grace_s=1))"
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
