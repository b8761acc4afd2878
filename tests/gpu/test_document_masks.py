"""Masks of documents on a GPU: they run as packed sequences where they can, and give what the mask says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from document_cases import (
    HEADS,
    NUMBERS,
    SEQ,
    D,
    Mask,
    causal,
    inputs,
    is_packed,
    of_all,
    of_items,
    right,
    windowed,
    within,
)
from torch import Tensor

from flash_attention import attention, explain_choice, last_kernel
from flash_attention.mods import and_masks
from flash_attention.run import launch_cache


def check(mask: Callable[[Tensor], Mask], numbers: Tensor, batch: int, **options: Any) -> None:
    """Output and gradients of calls that were made before, too."""
    *own, dout = inputs(batch)
    wide = [x.double().requires_grad_() for x in own]
    expected = right(*wide, mask(numbers))[0]
    exact = torch.autograd.grad(expected, wide, dout.double())
    there = mask(numbers.cuda())
    for _ in range(3):
        leaves = [x.cuda().requires_grad_() for x in own]
        with torch.no_grad():
            found = attention(*leaves, mask_mod=there, **options)
        out = attention(*leaves, mask_mod=there, **options)
        for x in (found, out):
            assert (x.detach().cpu().double() - expected.detach()).abs().max() < 4e-3
        for x, y in zip(torch.autograd.grad(out, leaves, dout.cuda()), exact, strict=True):
            assert (x.cpu().double() - y).abs().max() < 1e-2 * y.abs().max() + 4e-3


CASES: dict[str, tuple[Callable[[Tensor], Mask], Tensor, int]] = {
    "one item": (of_all, NUMBERS, 1),
    "two items": (of_all, NUMBERS, 2),
    "of each item": (of_items, torch.stack([NUMBERS, NUMBERS.flip(0).div(2).int()]), 2),
    "causal": (lambda document: and_masks(causal, of_all(document)), NUMBERS, 2),
    "window": (windowed, NUMBERS.int(), 2),
    "places within": (within, NUMBERS, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_are_packed_sequences(name: str) -> None:
    mask, numbers, batch = CASES[name]
    check(mask, numbers, batch)
    assert is_packed()
    q, k, v = (x.cuda() for x in inputs(batch)[:3])
    with torch.no_grad():
        attention(q, k, v, mask_mod=mask(numbers.cuda()))
        assert explain_choice(q, k, v, mask_mod=mask(numbers.cuda())).kernel == last_kernel()


def test_numbers_that_stand_twice_are_a_mask() -> None:
    check(of_all, NUMBERS % 2, 2)
    assert not is_packed()


def test_short_documents_are_a_mask() -> None:
    check(of_all, torch.arange(SEQ, device="cpu") // 16, 1)
    assert not is_packed()


def test_what_is_written_is_read_again() -> None:
    q, k, v = inputs(1)[:3]
    there = NUMBERS.cuda()
    for change in (lambda: None, lambda: there[100:200].fill_(9), lambda: there.copy_(there.flip(0))):
        change()
        expected = right(q, k, v, of_all(there.cpu()))[0]
        for _ in range(3):
            found = attention(q.cuda(), k.cuda(), v.cuda(), mask_mod=of_all(there))
            assert (found.cpu().double() - expected).abs().max() < 4e-3


def test_a_graph_reads_the_mask_in_each_replay() -> None:
    q, k, v = inputs(1)[:3]
    there = NUMBERS.cuda()
    on_device = [x.cuda() for x in (q, k, v)]
    mask = of_all(there)
    attention(*on_device, mask_mod=mask)
    assert is_packed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(*on_device, mask_mod=mask)
    for change in (lambda: None, lambda: there.copy_(there.flip(0) // 2)):
        change()
        graph.replay()
        expected = right(q, k, v, of_all(there.cpu()))[0]
        assert (found.cpu().double() - expected).abs().max() < 4e-3


@pytest.mark.parametrize("batch", [1, 2])
def test_a_compiled_program_gives_the_same_bits(batch: int) -> None:
    torch._dynamo.reset()
    there = NUMBERS.cuda()
    *own, dout = (x.cuda() for x in inputs(batch))
    leaves = [x.requires_grad_() for x in own]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask_mod=lambda b, h, i, j: there[i] == there[j], deterministic=True)

    results = []
    for program in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = program(*leaves)
        assert is_packed()
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", [(0, SEQ, HEADS, D), (2, 0, HEADS, D), (2, SEQ, 0, D)])
def test_without_a_query_nothing_is_read(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, dtype=torch.float16, device="cuda", requires_grad=True)
    out = attention(x, x, x, mask_mod=of_all(NUMBERS.cuda()))
    assert out.shape == shape
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.shape == shape


def test_small_items_that_are_no_rows_of_one_tensor() -> None:
    """(batch, heads, seq, d) turned: rows of the second item do not follow those of the first."""
    q, k, v = inputs(2)[:3]
    turned = [x.transpose(1, 2).contiguous().cuda().transpose(1, 2) for x in (q, k, v)]
    found = attention(*turned, mask_mod=of_all(NUMBERS.cuda()))
    assert not is_packed()
    assert (found.cpu().double() - right(q, k, v, of_all(NUMBERS))[0]).abs().max() < 4e-3


@pytest.mark.parametrize("batch", [1, 2])
def test_the_lse_is_as_of_batch_items(batch: int) -> None:
    q, k, v = inputs(batch)[:3]
    expected = right(q, k, v, of_all(NUMBERS))
    mask = of_all(NUMBERS.cuda())
    for _ in range(3):
        out, lse = attention(q.cuda(), k.cuda(), v.cuda(), mask_mod=mask, return_lse=True)
        assert lse.is_contiguous()
        for x, y in zip((out, lse), expected, strict=True):
            assert (x.cpu().double() - y).abs().max() < 4e-3


def test_an_output_of_the_callers_is_written() -> None:
    q, k, v = (x.cuda() for x in inputs(2)[:3])
    mask, out = of_all(NUMBERS.cuda()), torch.empty_like(q)
    expected = attention(q, k, v, mask_mod=mask)
    for _ in range(3):
        out.fill_(torch.nan)
        assert attention(q, k, v, mask_mod=mask, out=out) is out
        assert torch.equal(out, expected)
        assert is_packed()


def test_calls_made_before_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attention.run import gradients, passes

    launch_cache.forget()
    mask = of_all(NUMBERS.cuda())
    *own, dout = (x.cuda() for x in inputs(2))
    leaves = [x.requires_grad_() for x in own]

    def call() -> list[Tensor]:
        out = attention(*leaves, mask_mod=mask, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    expected, *_ = (call() for _ in range(3))
    for module, name in ((passes, "choose"), (passes, "choose_with_gradients"), (gradients, "backward_pass")):
        monkeypatch.setattr(module, name, lambda *a, **kw: pytest.fail("the long way"))
    for x, y in zip(call(), expected, strict=True):
        assert torch.equal(x, y)
