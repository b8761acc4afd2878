"""``make run``: what it computes beside PyTorch's own attention, and what it says."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_attention
from flash_helpers import run
from flash_helpers.benchmark.results import Row
from flash_helpers.console.output import TextConsole
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem

CPU = torch.device("cpu")
SMALL = [Problem(DType.BF16, 1, 2, 64, 64), Problem(DType.BF16, 1, 2, 64, 64, causal=True)]


def looked(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Row], str]:
    """Rows and text of a first look at small sizes."""
    monkeypatch.setattr(run, "problems_for", lambda device: SMALL)
    file = io.StringIO()
    rows = run.first_look(CPU, TextConsole(file=file))
    return rows, file.getvalue()


def test_attention_stands_beside_pytorch_with_choice_reason_and_next_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, shown = looked(monkeypatch)
    assert {row.implementation for row in rows} == {"attention", "sdpa"}
    assert all(row.status == "ok" and row.timings["hot"].median > 0 for row in rows)
    for problem in SMALL:
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{problem.label()}  "))
        *numbers, verdict = line.removeprefix(problem.label()).split()[-6:]
        ours, theirs, ratio, error, other_error = map(float, numbers)
        assert verdict == "right"
        assert ratio == pytest.approx(theirs / ours, abs=0.02)
        assert 0 < error < 0.01
        assert 0 < other_error < 0.01
    q, k, v = SMALL[0].inputs(CPU)
    choice = flash_attention.explain_choice(q, k, v)
    assert f"since  {choice.reason}" in shown
    assert "chosen PyTorch's own fused attention" in shown
    assert "flash-attention doctor" in shown or "-m flash_attention doctor" in shown


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("wrong", 1), ("failed", 1)])
def test_a_wrong_or_failed_attention_ends_with_status_1(
    status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = looked(monkeypatch)
    monkeypatch.setattr(run, "first_look", lambda *_: [replace(row, status=status) for row in rows])
    assert run.main() == code


def test_next_steps_are_commands_that_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ".venv" / "bin" / "flash-attention"
    program.parent.mkdir(parents=True)
    program.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.sys, "executable", str(program.with_name("python")))
    assert run.next_steps(CPU)[1] == "  .venv/bin/flash-attention doctor"
    assert run.next_steps(torch.device("cuda"))[1].startswith("  .venv/bin/flash-attention bench ")
