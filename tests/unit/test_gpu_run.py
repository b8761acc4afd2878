"""``pytest --gpu-run``: a run without GPU tests has failed; the outcome is told and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ON_THE_CPU = "def test_on_the_cpu():\n    pass\n"
SKIPPED = "import pytest\ndef test_skipped():\n    pytest.skip()\n"
# The mark alone would deselect it here: what ran is what was marked and not skipped.
ON_A_GPU = "def test_on_a_gpu(request):\n    request.node.keywords['gpu'] = True\n"
BROKEN = """
import pytest

@pytest.fixture
def broken():
    raise OSError

def test_broken(broken):
    pass

def test_wrong():
    assert 1 + 1 == 3
"""


def run(folder: Path, cases: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was printed, and the file that was written."""
    case, file = folder / "test_case.py", folder / "new" / "outcome.json"
    case.write_text(cases)
    options = [f"--confcutdir={TESTS}", f"--rootdir={folder}", "-c", "/dev/null", "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "conftest",
        f"--gpu-run={file}",
        *options,
        str(case),
    ]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    return result.returncode, result.stdout + result.stderr, json.loads(file.read_text())


def test_without_gpu_tests_it_has_failed(tmp_path: Path) -> None:
    code, printed, outcome = run(tmp_path, ON_THE_CPU + SKIPPED)
    assert code == 1
    assert "no GPU test ran" in printed
    assert outcome["gpu_tests_run"] == 0


def test_with_one_it_has_passed(tmp_path: Path) -> None:
    code, printed, outcome = run(tmp_path, ON_THE_CPU + SKIPPED + ON_A_GPU)
    assert code == 0, printed
    assert (outcome["gpu_tests_run"], outcome["failed"]) == (1, [])
    assert "1 GPU tests ran" in printed
    assert outcome["environment"]["torch"]


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    code, printed, outcome = run(tmp_path, ON_THE_CPU + SKIPPED + ON_A_GPU + BROKEN)
    assert code == 1
    counts = outcome["files"]["test_case.py"]
    assert [counts[word] for word in ("passed", "failed", "skipped")] == [2, 2, 1]
    assert outcome["failed"] == ["test_case.py::test_broken", "test_case.py::test_wrong"]
    (line,) = (line for line in printed.splitlines() if line.startswith("test_case.py "))
    assert line.split()[1:4] == ["2", "2", "1"]
