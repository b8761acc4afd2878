"""The tests leave nothing in the folder that they run in: what appears there fails a run.

A file that a test writes where it stands, and not into its own folder, is soon committed by someone.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def untracked(folder: Path) -> set[str] | None:
    """Files and folders right in the checkout that git neither knows nor ignores; None: it is no checkout."""
    command = ["git", "-C", str(folder), "ls-files", "--others", "--exclude-standard", "--directory"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return {name for name in shown.splitlines() if "/" not in name.rstrip("/")}


class CleanTree:
    """Compares a folder before and after all tests, in the process that leads the run."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._before = folder, untracked(folder)
        self.left: set[str] = set()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the run where something was left."""
        after = untracked(self._folder)
        if self._before is None or after is None:
            return
        self.left = after - self._before
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names what was left."""
        if self.left:
            names = ", ".join(sorted(self.left))
            terminalreporter.write_line(
                f"FAILED: a test left {names} in {self._folder}; it must write into its tmp_path", red=True
            )
