"""Every launch that calls ask for keeps to CUDA's limits, and the launcher takes what the host prepared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile
TIME_LIMIT_S = 600


@pytest.mark.parametrize("family", ["ampere", "hopper"])
def test_no_launch_is_refused(family: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("launched_calls.py")
    done = subprocess.run(
        [sys.executable, str(script), family, str(tmp_path)],
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    *refused, told = done.stdout.splitlines()
    assert refused == []
    counts = json.loads(told)
    assert counts["calls"] == 420
    assert counts["kernels"] > 200
    assert counts["launches"] > counts["calls"]  # some in two steps
