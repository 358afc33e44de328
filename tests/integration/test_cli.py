"""The command line as a user meets it: real processes, their streams and exit statuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from shardam_testing.processes import clean_environment, free_port

COMMANDS = ("up", "shard", "admin", "status", "demo", "version")
HELP_LIMIT_S = 20.0  # ten times what help may take on a slow machine
PEAK_MEMORY_BYTES = 200 * 2**20  # DESIGN.md, section 2

SPY = """
import atexit, pathlib, re, sys
def report():
    status = pathlib.Path("/proc/self/status").read_text()  # ru_maxrss would count the parent's memory at the fork
    peak = int(re.search(r"VmHWM:\\s+([0-9]+) kB", status)[1]) * 1024
    print("torch" in sys.modules, peak, file=sys.__stderr__)
atexit.register(report)
from shardam_server.__main__ import run
run()
"""
"""Runs the command line, then says on stderr whether torch is loaded and how much memory was used."""


def shardam(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardam_server", *arguments],
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refusal(*arguments: str, status: int = 2, **environment: str) -> str:
    """Runs a command line that is refused, and returns the one line that says why."""
    done = shardam(*arguments, **environment)
    assert done.stdout == ""
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("shardam: ")
    return lines[0].removeprefix("shardam: ")


def spied(*arguments: str) -> tuple[bool, int]:
    """Runs a command line; returns whether it loaded torch, and its peak memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", SPY, *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=HELP_LIMIT_S,
        check=False,
    )
    loaded, peak = done.stderr.splitlines()[-1].split()
    return loaded == "True", int(peak)


@pytest.mark.parametrize(
    "arguments",
    [("--help",), *((command, "--help") for command in COMMANDS), ("up", "--no-such-flag"), ("shard",), ("status",)],
    ids=" ".join,
)
def test_neither_help_nor_a_refusal_loads_torch(arguments: tuple[str, ...]) -> None:
    loaded, peak = spied(*arguments)
    assert not loaded
    assert peak < PEAK_MEMORY_BYTES


def test_the_modules_of_shard_and_admin_do_not_load_torch() -> None:
    program = "import sys, shardam_server.shard.process, shardam_server.admin.process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_help_lists_every_command_with_a_line_and_an_example() -> None:
    done = shardam("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f"\n  {command:<8} " in done.stdout
        assert f"$ shardam {command}" in done.stdout


def test_without_a_command_help_is_shown_as_for_a_mistake() -> None:
    done = shardam()
    assert done.returncode == 2
    assert "usage: shardam COMMAND" in done.stdout


@pytest.mark.parametrize("arguments", [("version",), ("--version",)])
def test_the_version_is_printed(arguments: tuple[str, ...]) -> None:
    done = shardam(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith("shardam 0.")


def test_an_unknown_command_is_refused_with_the_nearest() -> None:
    assert refusal("statsu") == "unknown command 'statsu' (did you mean status?); see shardam --help"


@pytest.mark.parametrize("command", ["up", "shard", "admin", "status"])
def test_an_unknown_flag_is_refused_with_the_nearest(command: str) -> None:
    assert "unknown flag --clustr (did you mean --cluster?)" in refusal(command, "--clustr", "x")


def test_a_wrong_environment_value_is_refused_under_its_name() -> None:
    assert refusal("up", SHARDAM_SHARDS="many").startswith("SHARDAM_SHARDS 'many': must be a valid integer")


@pytest.mark.parametrize("command", ["up", "shard", "admin"])
def test_a_bind_beyond_this_machine_without_a_token_is_refused(command: str) -> None:
    members = ["--redis", "redis://127.0.0.1:1"] if command != "up" else []
    members += ["--index", "0", "--shards", "1"] if command == "shard" else []
    message = refusal(command, "--host", "0.0.0.0", *members)
    assert message.startswith("--host 0.0.0.0 can be reached from other machines and there is no token")
    assert "--insecure" in message


@pytest.mark.case("C103")
@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_up_names_a_taken_port_and_its_flag_before_anything_starts(flag: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        other = "--admin-port" if flag == "--port" else "--port"
        message = refusal("up", "--shards", "1", flag, str(port), other, "0", status=1)
    assert message == f"port {port} is in use: choose another with {flag}"


def test_up_names_a_folder_that_it_cannot_write_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    message = refusal("up", "--port", "0", "--admin-port", "0", SHARDAM_DATA_DIR=str(path))
    assert message.startswith(f"--data-dir {path} cannot be written (")
    assert message.endswith("name another folder, or keep rows in memory only with --data-dir none")


@pytest.mark.case("C103")
@pytest.mark.parametrize("command", ["shard", "admin"])
def test_a_child_names_a_taken_port_and_its_flag(command: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        members = ["--index", "0", "--shards", "1"] if command == "shard" else []
        done = shardam(command, "--port", str(port), "--redis", "redis://127.0.0.1:1", *members)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"shardam: port {port} is in use: choose another with --port"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["up", "status"])
def test_a_redis_that_does_not_answer_is_named_without_its_password(command: str) -> None:
    port = free_port()
    arguments = ["--port", "0", "--admin-port", "0"] if command == "up" else []
    done = shardam(command, "--redis", f"redis://:hunter2@127.0.0.1:{port}/0", *arguments)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"shardam: Redis at redis://:***@127.0.0.1:{port}/0 does not answer")
    assert "--redis" in last
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shardam_server", "--help"]
    done = subprocess.run(command, env=clean_environment(), stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
