"""The programs of the page on context parallelism, run by one process as a group of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PAGE = (Path(__file__).parents[2] / "docs" / "context-parallel.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun sets up."""
    start = dist.init_process_group
    store = dist.FileStore(str(tmp_path / "store"), 1)
    monkeypatch.setattr(dist, "init_process_group", lambda: start("gloo", store=store, rank=0, world_size=1))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_the_first_program_computes_attention() -> None:
    rows: dict[str, Any] = {name: torch.randn(1, 65536, 1, 8).bfloat16() for name in ("q", "k", "v")}
    exec(compile(SNIPPETS[0].replace("4096", "64"), "docs/context-parallel.md", "exec"), rows)
    assert rows["out"].shape == (1, 65536, 1, 8)
    assert torch.isfinite(rows["out"]).all()


def test_the_second_program_explains_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPETS[1], "docs/context-parallel.md", "exec"), {})
    assert "predicted from" in capsys.readouterr().out
