"""The training example: its losses do not depend on the number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compile  # takes long

ROOT = Path(__file__).parents[2]
OPTIONS = ("--cpu", "--steps", "10", "--tokens", "96", "--hidden", "64", "--rate", "0.1")


EXAMPLE = ROOT / "docs" / "examples" / "train_context_parallel.py"


def losses(world: int, folder: Path, *more: str, program: Path = EXAMPLE) -> list[float]:
    file = folder / f"losses-{world}.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        str(program), *OPTIONS, *more, "--json", str(file),
    ]  # fmt: skip
    path = os.pathsep.join((str(ROOT), str(ROOT / "py")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(file.read_text())


def test_the_loss_curve_is_that_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one, two = losses(1, tmp_path), losses(2, tmp_path, "--method", "ring")
    assert len(one) == len(two) == 10
    assert one[-1] < one[0] - 0.5  # it learns
    assert all(abs(a - b) < 1e-3 * max(1.0, a) for a, b in zip(one, two, strict=True)), (one, two)


def test_ranks_end_while_other_threads_want_the_interpreter(tmp_path: Path) -> None:
    """gloo's threads free tensors while a rank ends, where nobody gives it up before. An interpreter that
    shuts down ends such threads within a function that must not be left, which aborts the process."""
    pytest.importorskip("transformers")
    program = tmp_path / "greedy.py"
    program.write_text(
        "import runpy, sys\n"
        "sys.setswitchinterval(100)\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    for _ in range(2):
        assert len(losses(2, tmp_path, "--method", "ring", "--steps", "2", program=program)) == 2
