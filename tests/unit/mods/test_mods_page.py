"""The page on functions of the user's: its programs run and say what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_helpers.mods.mod import MAX_DIMENSIONS, MAX_NODES, Element
from flash_helpers.mods.operations import Kind

PAGE = (Path(__file__).parents[3] / "docs" / "mods.md").read_text(encoding="utf-8")


def test_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(programs) == 3
    exec("".join(programs), {})
    printed = capsys.readouterr().out
    assert "score = score + (t0[h] * to_float(k - q))" in printed
    assert "[[2 0 0 0 0 0 0 0]" not in printed  # the diagonal tile is partial
    assert "torch.Size([8, 127])" in printed
    assert "[[1 0 0 0 0 0 0 0]" in printed


def test_limits_are_those_of_the_library() -> None:
    assert f"At most {MAX_NODES} operations" in PAGE
    assert f"0 to {MAX_DIMENSIONS} dimensions" in PAGE
    for element in Element:
        assert element.label in PAGE or element.kind is Kind.INT  # integers are named by their bits
