"""The kernels that ``tests/gpu/sanitizer.py`` launches, listed for cards that are not there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "sanitizer.py"
FORWARD_KINDS = {
    "", "causal", "window", "softcap+sinks", "causal+varlen", "split", "varlen+split", "varlen+split+paged",
    "varlen+paged", "padded_head",
}  # fmt: skip


def listed(*words: str, failing: bool = False) -> list[str]:
    """What the command prints with ``--list`` or says is wrong, in lines."""
    run = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=60)
    assert (run.returncode != 0) == failing, run.stderr
    return (run.stderr if failing else run.stdout).splitlines()


@pytest.fixture(scope="module")
def every() -> dict[str, list[str]]:
    return {device: listed("--list", "--device", device) for device in ("A100", "H100")}


@pytest.mark.parametrize(("device", "families"), [("A100", 1), ("H100", 2)])
def test_every_kind_of_both_directions_is_there(
    device: str, families: int, every: dict[str, list[str]]
) -> None:
    lines = every[device]
    forward = [line for line in lines if "backward" not in line]
    backward = [line for line in lines if "backward" in line]
    assert len(forward) == families * len(FORWARD_KINDS)
    assert {line.partition(" | ")[2] for line in forward} == FORWARD_KINDS
    assert {line.partition(" | ")[2] for line in backward} >= {"", "causal", "window", "softcap"}
    for found in (forward, backward):
        assert any(re.search(r"[ +]tma\+", line) for line in found) == (families == 2)
    assert len(set(lines)) == len(lines)


def test_words_and_parts_pick_kernels(every: dict[str, list[str]]) -> None:
    causal = [line for line in every["H100"] if "causal" in line and "backward" in line]
    assert listed("--list", "--device", "H100", "--direction", "backward", "causal", "1/3") == causal[1::3]


def test_a_card_that_is_not_there_runs_nothing() -> None:
    assert listed("--device", "A100", failing=True)[-1].startswith("--device goes with --list")
