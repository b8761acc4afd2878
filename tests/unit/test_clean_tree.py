"""A run of the tests that leaves a file in the checkout fails, and names the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from pathlib import Path
import pytest
sys.path.insert(0, sys.argv[1])
from clean_tree import CleanTree
plugin = CleanTree(Path.cwd())
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"], plugins=[plugin]))
"""


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("__pycache__/\n/dist/\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "notes.txt").write_text("there before\n")
    return tmp_path


@pytest.mark.parametrize(
    ("body", "status", "left"),
    [
        ("open('nothing-0.0.3.whl', 'w').close()", 1, "nothing-0.0.3.whl"),
        ("import os; os.makedirs('made'); open('made/file', 'w').close()", 1, "made/"),
        ("import os; os.makedirs('dist'); open('dist/file', 'w').close()", 0, ""),  # git ignores it
        ("open(tmp_path / 'nothing-0.0.3.whl', 'w').close()", 0, ""),
        ("open('notes.txt', 'w').close()", 0, ""),
    ],
)
def test_what_a_test_leaves_fails_the_run(checkout: Path, body: str, status: int, left: str) -> None:
    (checkout / "tests" / "test_it.py").write_text(f"def test_it(tmp_path):\n    {body}\n")
    run = subprocess.run(
        [sys.executable, "-c", RUN, ROOT / "tests"], cwd=checkout, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert "1 passed" in run.stdout
    assert (f"FAILED: a test left {left} in {checkout}; " in run.stdout) is bool(left)


def test_no_package_is_among_the_projects_files() -> None:
    """As one was that a command had left there."""
    try:
        names = git(ROOT, "ls-files").splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    assert names
    assert not [name for name in names if name.endswith((".whl", ".so", ".o", ".tar.gz", ".pyc"))]
