"""``flash-attention explain`` of the calls that servers make: the same problem and kernel as the call's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flash_attention.call import Mask, problem_of
from flash_attention.layouts import Cached, Layout, PackedCached
from flash_attention.run.cuda_choice import choice_for
from flash_helpers.cli import app
from flash_helpers.kernel_configs import device_facts
from flash_helpers.select.errors import NoKernelError

BATCH, HEADS, HEADS_KV, D = 4, 16, 4, 128
QUERIES, KEYS = 48, 4096
SIZES = (
    "--batch", str(BATCH), "--heads", str(HEADS), "--heads-kv", str(HEADS_KV), "--seq-len", str(QUERIES),
    "--seq-len-k", str(KEYS), "--causal",
)  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def explained(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["explain", *arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    return dict(found)


def tensors(page_size: int, planned: bool) -> tuple[tuple[torch.Tensor, ...], Layout]:
    """A call over a cache; ``page_size`` 0: in one piece."""
    q = meta(BATCH * QUERIES, HEADS, D) if planned else meta(BATCH, QUERIES, HEADS, D)
    table = ints(BATCH, KEYS // page_size) if page_size else None
    shape = (BATCH * KEYS // page_size, page_size) if page_size else (BATCH, KEYS)
    k = meta(*shape, HEADS_KV, D)
    if planned:
        return (q, k, k), PackedCached(ints(BATCH + 1), None, None, ints(BATCH), table, QUERIES, KEYS)
    return (q, k, k), Cached(ints(BATCH), table)


@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.parametrize("planned", [False, True], ids=["cached", "planned"])
@pytest.mark.parametrize("page_size", [0, 8, 64])
@pytest.mark.parametrize("device", ["A100", "H200"])
def test_a_call_and_the_command_line_get_one_kernel(
    device: str, page_size: int, planned: bool, invariant: bool
) -> None:
    qkv, layout = tensors(page_size, planned)
    problem = problem_of(*qkv, Mask.of(True, (None, None)), layout=layout, invariant=invariant)
    facts = device_facts(device)
    options = ["--planned"] if planned else ["--cached"]
    options += ["--paged", "--page-size", str(page_size)] if page_size else []
    options += ["--numerics", "invariant"] if invariant else []
    if (device, page_size, invariant) == ("H200", 8, True):  # no other family has the same bits
        with pytest.raises(NoKernelError):
            choice_for(problem, facts, device, None, explained=False)
        refused = CliRunner().invoke(app, ["explain", *SIZES, "--device", device, *options])
        assert refused.exit_code == 2
        assert "no kernel computes" in refused.output
        return
    choice = choice_for(problem, facts, device, None, explained=False)
    found = explained(*SIZES, "--device", device, *options)
    assert found["chosen"] == choice.kernel.short_form()
    assert found["reason"] == choice.reason


def test_pages_that_bulk_copies_cannot_reach_get_another_kernel() -> None:
    chosen = {
        size: explained("--device", "H200", "--paged", "--page-size", size)["chosen"]
        for size in ("0", "16", "24")
    }
    assert chosen["0"] == chosen["16"] != chosen["24"]


@pytest.mark.parametrize("device", ["A100", "H200"])
def test_the_kernel_of_a_servers_call_is_explained_by_its_name(device: str) -> None:
    options = (*SIZES, "--device", device, "--planned", "--paged")
    name = explained(*options)["chosen"]
    assert name.endswith("planned")
    assert explained(name, *options)["kernel"] == name
    refused = CliRunner().invoke(app, ["explain", name, *SIZES, "--device", device, "--paged"])
    assert refused.exit_code == 2
    assert "give it as an option (--planned)" in " ".join(refused.output.split())
