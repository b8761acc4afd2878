"""``pytest --gpu-run FILE``: a run that must use a GPU, with a table in the end and its outcome in a file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from flash_helpers.benchmark.environment import environment

OUTCOMES = ("passed", "failed", "skipped")


class GpuRun:
    """Counts what became of the tests of each file; a run in which no GPU test ran has failed.

    Args:
        file: gets JSON: ``environment``, ``gpu_tests_run``, ``files`` (outcomes and seconds of each), and the
            names of those that ``failed``.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()
        self._failed: list[str] = []
        self._ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[0]
        self._seconds[name] += report.duration
        if (
            report.when == "call" or report.outcome != "passed"
        ):  # set-up and tear-down count where they end it
            self._outcomes.setdefault(name, Counter())[report.outcome] += 1
        if report.failed:
            self._failed.append(report.nodeid)
        if report.when == "call" and not report.skipped and "gpu" in report.keywords:
            self._ran += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._ran and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        files = {
            name: {outcome: counts[outcome] for outcome in OUTCOMES}
            | {"seconds": round(self._seconds[name], 1)}
            for name, counts in sorted(self._outcomes.items())
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        outcome = {
            "environment": environment(device),
            "gpu_tests_run": self._ran,
            "files": files,
            "failed": self._failed,
        }
        self._file.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")

        write = terminalreporter.write_line
        width = max(map(len, files), default=4)
        write(f"{'file':{width}}" + "".join(f"{title:>9}" for title in (*OUTCOMES, "seconds")))
        for name, row in files.items():
            write(f"{name:{width}}" + "".join(f"{row[title]:>9}" for title in (*OUTCOMES, "seconds")))
        write(f"{self._ran} GPU tests ran; {self._file}")
        if not self._ran:
            write("no GPU test ran, all were skipped or none was selected: the run has failed", red=True)
