"""Sequences that tall blocks of head size 64 would not fill, and few blocks: what runs is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_attention import attention, attention_varlen, explain_choice, last_kernel
from flash_attention.backends.cuda import device_facts_of
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem, visible_limits
from flash_helpers.select.select import select
from flash_helpers.test.reference import reference

D_HEAD = 64
LENGTHS = (1, 63, 64, 77, 100, 128)
MASKS = {"plain": {}, "causal": {"causal": True}, "capped": {"softcap": 20.0}}
TOLERANCE, LSE_TOLERANCE = 0.016, 2e-3


def problem_of(queries: int, keys: int, heads: int, batch: int, **mask: Any) -> AttentionProblem:
    limits = visible_limits(mask.get("causal", False), (None, None), queries, keys)
    sizes = (batch, queries, keys, heads, heads, D_HEAD, D_HEAD)
    return AttentionProblem(DType.BF16, *sizes, *limits, softcap="softcap" in mask, lse=True)


def chosen(name: str, queries: int, keys: int, heads: int, batch: int) -> Any:
    """A parameter with the kernel in it, which is built before the first test."""
    problem = problem_of(queries, keys, heads, batch, **MASKS[name])
    kernel = select(problem, device_facts("H200"), explained=False).kernel
    return pytest.param(kernel, name, queries, keys, heads, batch, id=f"{name} {queries}x{keys} h{heads}")


CALLS = [
    *(chosen(name, queries, queries, 24, 40) for name in MASKS for queries in (*LENGTHS, 129, 300)),
    *(
        chosen("plain", queries, keys, 24, 40)
        for queries, keys in ((77, 16), (100, 80), (128, 200), (60, 500))
    ),
    *(chosen("causal", queries, keys, 24, 40) for queries, keys in ((100, 300), (128, 70))),
    *(chosen(name, queries, 1024, 16, 1) for name in MASKS for queries in (1000, 1024)),
]


@pytest.mark.parametrize(("kernel", "name", "queries", "keys", "heads", "batch"), CALLS)
def test_what_is_chosen_is_right(
    kernel: Kernel, name: str, queries: int, keys: int, heads: int, batch: int
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, n, heads, D_HEAD).bfloat16() for n in (queries, keys, keys))
    on_gpu = [x.cuda() for x in (q, k, v)]
    out, lse = attention(*on_gpu, **MASKS[name], return_lse=True)
    if device_facts_of().name == device_facts("H200").name:
        assert last_kernel() == explain_choice(*on_gpu, **MASKS[name], return_lse=True).kernel == kernel
    some = slice(0, batch, 7)  # the reference takes its time
    expected, expected_lse = reference(q[some], k[some], v[some], **MASKS[name])
    assert (out[some].double().cpu() - expected).abs().max() < TOLERANCE
    seen = expected_lse.isfinite()
    assert torch.equal(lse[some].cpu().isfinite(), seen)
    assert (lse[some].double().cpu() - expected_lse)[seen].abs().max() < LSE_TOLERANCE
    assert torch.equal(attention(*on_gpu, **MASKS[name], return_lse=True)[0], out)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_up_to_128(causal: bool) -> None:
    torch.manual_seed(0)
    lengths = [1, 128, 64, 65, 0, 127, 3, 100] * 20
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.randn(int(ends[-1]), 8, D_HEAD).bfloat16() for _ in range(3))
    on_gpu = [x.cuda() for x in (q, k, v)]
    out = attention_varlen(*on_gpu, ends.cuda(), ends.cuda(), 128, 128, causal=causal).double().cpu()
    assert last_kernel().config.B_r == 128
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if begin < end:
            part = slice(begin, end)
            expected = reference(q[None, part], k[None, part], v[None, part], causal=causal)[0][0]
            assert (out[part] - expected).abs().max() < TOLERANCE
