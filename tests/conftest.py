"""What holds for every test: a clean environment away from the user's state folder, repeatable Hypothesis runs, no skip that is
not on the list, and a summary of what tests measured.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import hypothesis
import pytest
from shardam_testing.matrix import matrix_environment
from shardam_testing.state_home import fresh_state_home, remove_state_homes

SKIPS_PATH = Path(__file__).with_name("skips.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Removes what a developer's shell may set and registers the check of skips."""
    for name in list(os.environ):
        if name.startswith("SHARDAM_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]
    os.environ.update(matrix_environment())
    os.environ["XDG_STATE_HOME"] = str(fresh_state_home())  # no test keeps anything with the user's own state
    # No deadline: a busy machine is no failure. Derandomized: a red run can be repeated.
    hypothesis.settings.register_profile("shardam", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("shardam")
    config.pluginmanager.register(SkipCheck(), "shardam-skip-check")
    config.pluginmanager.register(Measured(), "shardam-measured")


def pytest_unconfigure() -> None:
    """Removes what processes of tests have kept."""
    remove_state_homes()


class Measured:
    """Prints what passed tests recorded as the property "summary"; under xdist, too."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the property when the test and its fixtures are done."""
        if report.when == "teardown":
            self.lines += [f"{report.nodeid}: {value}" for name, value in report.user_properties if name == "summary"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the lines."""
        if self.lines:
            terminalreporter.section("measured")
            for line in sorted(self.lines):
                terminalreporter.line(line)


class SkipCheck:
    """Fails the run if a test skipped for a reason that tests/skips.toml does not allow here."""

    def __init__(self) -> None:
        entries = tomllib.loads(SKIPS_PATH.read_text(encoding="utf-8"))["skip"]
        in_ci = os.environ.get("CI") == "true"
        self.allowed = {entry["reason"] for entry in entries if entry["hardware"] or not in_ci}
        self.known = {entry["reason"]: entry["needs"] for entry in entries}
        self.refused: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sees each test's outcome; under xdist the workers' reports reach the controller, too."""
        self.check(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Sees modules that skip as a whole."""
        self.check(report)

    def check(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Notes a skip that is not allowed; an expected failure also counts as skipped for pytest, but is none."""
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in self.allowed:
            self.refused[report.nodeid] = reason

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turns a refused skip into a failed run."""
        if self.refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names the refused skips and what would let the tests run."""
        if not self.refused:
            return
        terminalreporter.section("skips that are not allowed", red=True)
        for nodeid, reason in self.refused.items():
            remedy = f"needs {self.known[reason]}" if reason in self.known else f"not on the list in {SKIPS_PATH.name}"
            terminalreporter.line(f"{nodeid}: {reason} ({remedy})")
