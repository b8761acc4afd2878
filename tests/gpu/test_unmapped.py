"""Nothing beyond a tensor is read or written, not even where dropping it would hide that."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from unmapped_cases import CASES

SCRIPT = Path(__file__).parent / "unmapped_cases.py"
TIME_LIMIT_S = 100


def run(*arguments: str) -> str:
    """What the cases print, in a process of their own: an illegal access leaves no working GPU behind."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=TIME_LIMIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def _compiled() -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        list(pool.map(lambda i: run("none", str(i)), range(len(CASES))))


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("edge", ["end", "begin"])
def test_tensors_at_the_edge_of_mapped_memory(edge: str) -> None:
    said = run(edge)
    assert said.count("right: ") == said.count("Case(") >= len(CASES)
