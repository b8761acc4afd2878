"""A plugin of pytest for runs without a GPU: ends tests that take long, and writes what became of each.

A test that ended early has not asked for all of its kernels.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.ahead.pretending import FOLDER, LIMIT

SUFFIX = ".outcomes"


class TooLongError(Exception):
    """A test has taken longer than its limit: on the CPU everything is slower."""


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.dump_traceback_later = lambda *_, **__: None  # kernels do not hang here, and all is slower
    if not hasattr(config, "workerinput"):  # with xdist, reports reach the controller
        folder = Path(os.environ[FOLDER])
        config.pluginmanager.register(_Outcomes(folder / f"{os.getpid()}-{uuid.uuid4().hex}{SUFFIX}"))


class _Outcomes:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        why = str(report.longrepr).strip().splitlines()[-1:] if report.failed else []
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome, *why]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _limited()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _limited()


def _limited() -> Iterator[None]:
    limit = float(os.environ[LIMIT])

    def end(_: int, __: FrameType | None) -> None:
        raise TooLongError(f"not done in {limit:g} s on the CPU")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read(folder: Path) -> dict[str, tuple[str, str]]:
    """Of each test its outcome, the latest of several runs, and why it failed."""
    found: dict[str, tuple[str, str]] = {}
    for file in sorted(folder.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, outcome, *why = json.loads(line)
            found[name] = outcome, "".join(why)
    return found
