"""Nothing beyond a tensor is read or written, not even where dropping it would hide that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "unmapped_cases.py"
TIME_LIMIT_S = 110


@pytest.mark.parametrize("edge", ["end", "begin"])
def test_tensors_at_the_edge_of_mapped_memory(edge: str) -> None:
    """In a process of its own: an illegal access leaves no working GPU behind."""
    done = subprocess.run(
        [sys.executable, str(CASES), edge], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.count("right: ") > 20
