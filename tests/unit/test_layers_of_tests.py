"""Every test is in one layer; GPU tests are deselected without a GPU; CI runs every layer that needs none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from layers import LAYERS

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CASES = """
import subprocess, pytest

def test_plain():
    pass

@pytest.mark.compile
def test_compiles():
    subprocess.run(["g++", "-dumpversion"])

@pytest.mark.gpu
@pytest.mark.compile
def test_on_a_gpu():
    raise AssertionError("there is no GPU")

@pytest.mark.perf
def test_fast():
    pass
"""


def run(folder: Path, cases: str, *options: str) -> tuple[int, str]:
    """Exit status and output of pytest on one file, under this project's conftest, without a GPU."""
    (folder / "test_case.py").write_text(cases)
    command = [
        sys.executable, "-m", "pytest", "-v", "-p", "conftest", f"--confcutdir={TESTS}",
        f"--rootdir={folder}",
        "-c", "/dev/null", "-p", "no:cacheprovider", *options, str(folder / "test_case.py"),
    ]  # fmt: skip
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    return result.returncode, result.stdout + result.stderr


def outcomes(printed: str) -> dict[str, str]:
    return dict(re.findall(r"::(\w+) (PASSED|FAILED|SKIPPED|ERROR)", printed))


def test_gpu_tests_are_deselected_without_a_gpu_and_marks_select(tmp_path: Path) -> None:
    code, printed = run(tmp_path, CASES)
    assert code == 0, printed
    assert outcomes(printed) == dict.fromkeys(("test_plain", "test_compiles", "test_fast"), "PASSED")
    assert "1 deselected" in printed
    assert "skipped" not in printed
    for layer, name in (("unit", "test_plain"), ("compile", "test_compiles"), ("perf", "test_fast")):
        code, printed = run(tmp_path, CASES, "-m", layer)
        assert outcomes(printed) == {name: "PASSED"}, printed


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by their names: a second file of a name ends the run before the first test."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_unit_test_that_compiles_fails(tmp_path: Path) -> None:
    code, printed = run(tmp_path, CASES.replace("@pytest.mark.compile\ndef", "def", 1))
    assert code == 1
    assert "a test of layer unit ran g++: mark it with pytest.mark.compile" in printed


def test_two_layers_are_one_too_many(tmp_path: Path) -> None:
    code, printed = run(
        tmp_path, CASES.replace("@pytest.mark.perf", "@pytest.mark.perf\n@pytest.mark.compile")
    )
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "is marked compile and perf; a test is in one layer" in printed


def test_every_layer_has_its_command_and_ci_runs_all_that_need_no_gpu() -> None:
    recipes = dict(re.findall(r"^([\w-]+):[^\n=]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE))
    commands = {layer: name for layer in LAYERS for name, text in recipes.items() if f"-m {layer}" in text}
    assert set(commands) == set(LAYERS) - {"gpu"}
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    run_by_ci = set(re.findall(r"^make ([\w-]+)", ci, re.MULTILINE))
    assert set(commands.values()) | {"lint", "docs"} == run_by_ci
    (all_of_them,) = re.findall(r"^test-all: (.+)$", MAKEFILE, re.MULTILINE)
    assert set(all_of_them.split()) == set(commands.values())
    assert "-n" not in recipes[commands["perf"]].split()  # alone: times depend on what else runs
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert "make test\n" in ci
