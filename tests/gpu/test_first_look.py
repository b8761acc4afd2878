"""``make run`` on a GPU: it builds what ``attention()`` chooses, is right, and names the kernel that ran."""

from __future__ import annotations

import io

import torch

from flash_helpers import run
from flash_helpers.console.output import TextConsole


def test_the_first_look_names_the_kernels_that_ran() -> None:
    file = io.StringIO()
    rows = run.first_look(torch.device("cuda", torch.cuda.current_device()), TextConsole(file=file))
    shown = file.getvalue()
    ours = [row for row in rows if row.implementation == "attention"]
    assert len(ours) == len(run.problems_for(torch.device("cuda")))
    assert [row.status for row in ours] == ["ok"] * len(ours)
    for row in ours:
        assert f"chosen {row.kernel}" in shown
    assert torch.cuda.get_device_name() in shown
    assert "building what attention() chooses" in shown
