"""Masks of documents of several batch items that are no rows of one tensor: each item is a packed call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from document_cases import NUMBERS, SEQ, Mask, causal, inputs, is_packed, of_all, of_items, right, windowed
from torch import Tensor

from flash_attention import attention, explain_choice, last_kernel
from flash_attention.mods import and_masks
from flash_attention.run import document_calls, launch_cache

# The second item has fewer documents, and a longer one.
UNLIKE = torch.stack([NUMBERS, NUMBERS.flip(0).div(2).int()])
SHORT = torch.arange(SEQ, device="cpu") // 16  # quicker with the mask
CASES: dict[str, tuple[Callable[[Tensor], Mask], Tensor]] = {
    "of all items": (of_all, NUMBERS),
    "of each item": (of_items, UNLIKE),
    "causal": (lambda document: and_masks(causal, of_all(document)), NUMBERS),
    "causal, of each item": (lambda document: and_masks(causal, of_items(document)), UNLIKE),
    "window": (windowed, NUMBERS.int()),
}


@pytest.fixture
def _items_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of these tests are small: here the fewest blocks are calls of their own."""
    monkeypatch.setattr(document_calls, "BLOCKS_PER_SM", 0)
    monkeypatch.setattr(document_calls, "FLOP_PER_SM", 0)
    launch_cache.forget()


small_items = pytest.mark.usefixtures("_items_are_large")


def turned(x: Tensor) -> Tensor:
    """On the GPU, in memory of (batch, heads, seq, d): rows of the second item do not follow those of the
    first."""
    return x.cuda().transpose(1, 2).contiguous().transpose(1, 2)


def close(found: Tensor, expected: Tensor) -> None:
    assert (found.detach().cpu().double() - expected.detach()).abs().max() < 4e-3


def close_gradients(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x.cpu().double() - y).abs().max() < 1e-2 * y.abs().max() + 4e-3


@small_items
@pytest.mark.parametrize("n_heads_kv", [4, 2])
@pytest.mark.parametrize("name", CASES)
def test_each_item_is_packed_sequences(name: str, n_heads_kv: int) -> None:
    mask, numbers = CASES[name]
    q, k, v, dout = inputs(2)
    own = [q, *(x[:, :, :n_heads_kv] for x in (k, v))]
    wide = [x.double().requires_grad_() for x in own]
    per_key_head = [wide[0], *(x.repeat_interleave(4 // n_heads_kv, 2) for x in wide[1:])]
    expected = right(*per_key_head, mask(numbers))[0]
    exact = torch.autograd.grad(expected, wide, dout.double())
    there = mask(numbers.cuda())
    for _ in range(3):
        leaves = [turned(x).requires_grad_() for x in own]
        with torch.no_grad():
            close(attention(*leaves, mask_mod=there), expected)
            assert is_packed()
            assert explain_choice(*(x.detach() for x in leaves), mask_mod=there).kernel == last_kernel()
        out = attention(*leaves, mask_mod=there)
        assert is_packed()
        assert explain_choice(*leaves, mask_mod=there).kernel == last_kernel()
        close(out, expected)
        close_gradients(torch.autograd.grad(out, leaves, turned(dout)), exact)


@small_items
def test_gradients_are_of_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attention.run import passes

    leaves = [turned(x).requires_grad_() for x in inputs(2)[:3]]
    mask = of_items(UNLIKE.cuda())
    out = attention(*leaves, mask_mod=mask, deterministic=True)
    said = explain_choice(*leaves, mask_mod=mask, deterministic=True).gradients
    chosen = []
    choose = passes.choose
    monkeypatch.setattr(passes, "choose", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    grads = [torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2)]
    assert said is not None
    assert {choice.kernel for choice in chosen} == {said.kernel}
    assert said.kernel.traits.varlen
    assert said.kernel.mod is None
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


@small_items
@pytest.mark.parametrize("lay", [turned, Tensor.cuda], ids=["turned", "rows"])
@pytest.mark.parametrize("name", ["of all items", "of each item"])
def test_the_lse_of_items_is_written(name: str, lay: Callable[[Tensor], Tensor]) -> None:
    mask, numbers = CASES[name]
    *own, dout = inputs(2)
    wide = [x.double().requires_grad_() for x in own]
    out, lse = right(*wide, mask(numbers))
    dlse = dout.double().mean(-1).transpose(1, 2)
    exact = torch.autograd.grad([out, lse], wide, [dout.double(), dlse])
    there = mask(numbers.cuda())
    for _ in range(3):
        leaves = [lay(x).requires_grad_() for x in own]
        with torch.no_grad():
            results = attention(*leaves, mask_mod=there, return_lse=True)
        recorded = attention(*leaves, mask_mod=there, return_lse=True)
        for found in (results, recorded):
            assert is_packed()
            assert found[1].is_contiguous()
            close(found[0], out)
            close(found[1], lse)
        grads = torch.autograd.grad(recorded, leaves, [lay(dout), dlse.float().cuda()])
        close_gradients(grads, exact)


@small_items
@pytest.mark.parametrize("lay", [turned, Tensor.cuda], ids=["turned", "rows"])
def test_what_is_written_is_read_again(lay: Callable[[Tensor], Tensor]) -> None:
    """Calls that were made before, with the mask's kernel and as packed sequences, in turn."""
    *own, dout = inputs(2)
    wide = [x.double().requires_grad_() for x in own]
    there = NUMBERS.cuda()
    mask = of_all(there)
    for numbers, runs_packed in ((NUMBERS, True), (SHORT, False), (NUMBERS.flip(0), True), (SHORT, False)):
        there.copy_(numbers)
        expected = right(*wide, of_all(numbers))[0]
        exact = torch.autograd.grad(expected, wide, dout.double())
        for _ in range(3):
            leaves = [lay(x).requires_grad_() for x in own]
            with torch.no_grad():
                close(attention(*leaves, mask_mod=mask), expected)
                assert is_packed() == runs_packed
            out = attention(*leaves, mask_mod=mask)
            close(out, expected)
            close_gradients(torch.autograd.grad(out, leaves, lay(dout)), exact)


@small_items
def test_a_graph_reads_the_mask_in_each_replay() -> None:
    q, k, v = inputs(2)[:3]
    there = NUMBERS.cuda()
    on_device = [turned(x) for x in (q, k, v)]
    mask = of_all(there)
    attention(*on_device, mask_mod=mask)
    assert is_packed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(*on_device, mask_mod=mask)
    assert not is_packed()
    for change in (lambda: None, lambda: there.copy_(there.flip(0) // 2)):
        change()
        graph.replay()
        expected = right(q, k, v, of_all(there.cpu()))[0]
        close(found, expected)
        close(attention(*on_device, mask_mod=mask), expected)


@small_items
def test_a_compiled_program_gives_the_same_bits() -> None:
    torch._dynamo.reset()
    there = UNLIKE.cuda()
    *own, dout = (turned(x) for x in inputs(2))
    leaves = [x.requires_grad_() for x in own]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return there[b, i] == there[b, j]

        return attention(q, k, v, mask_mod=mask, deterministic=True, return_lse=True)

    results = []
    for program in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out, lse = program(*leaves)
        assert is_packed()
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    torch._dynamo.reset()


@small_items
@pytest.mark.parametrize("lay", [turned, Tensor.cuda], ids=["turned", "rows"])
def test_an_output_of_the_callers_is_written(lay: Callable[[Tensor], Tensor]) -> None:
    q, k, v = inputs(2)[:3]
    mask, out = of_all(NUMBERS.cuda()), turned(torch.empty_like(q))
    for _ in range(3):
        out.fill_(torch.nan)
        assert attention(lay(q), lay(k), lay(v), mask_mod=mask, out=out) is out
        close(out, right(q, k, v, of_all(NUMBERS))[0])
        assert is_packed()


@small_items
def test_keys_that_all_items_share() -> None:
    q, k, v = inputs(2)[:3]
    k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    found = attention(turned(q), k.cuda(), v.cuda(), mask_mod=of_items(UNLIKE.cuda()))
    assert is_packed()
    close(found, right(q, k, v, of_items(UNLIKE))[0])


@small_items
@pytest.mark.parametrize("options", [{"n_sms": 66}, {"out_dtype": torch.float32}, {"dropout_p": 0.1}])
def test_beside_other_options_the_mask_stays(options: dict[str, Any]) -> None:
    q, k, v = (turned(x) for x in inputs(2)[:3])
    mask = of_all(NUMBERS.cuda())
    assert explain_choice(q, k, v, mask_mod=mask).kernel.mod is None
    assert explain_choice(q, k, v, mask_mod=mask, **options).kernel.mod is not None


def are_calls(
    seq_len: int, length: int, *, batch: int = 16, n_heads_kv: int = 16, direction: str = "forward"
) -> bool:
    """Whether items of 16 heads, with documents of one length, are packed calls."""
    q, k = (
        torch.empty(1, seq_len, heads, 64, dtype=torch.float16, device="cuda").expand(batch, -1, -1, -1)
        for heads in (16, n_heads_kv)
    )
    mask = of_all(torch.arange(seq_len, device="cuda") // length)
    return explain_choice(q, k, k, mask_mod=mask, direction=direction).kernel.mod is None


def test_items_have_blocks_enough() -> None:
    """Four blocks of 128 rows for each SM. Gradients count key heads."""
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    enough, length = 128 * -(-4 * n_sms // 16), 1400
    assert are_calls(enough, length)
    assert not are_calls(enough - 128, length)
    assert are_calls(enough, length, n_heads_kv=4)
    assert are_calls(enough, length, direction="backward")
    assert not are_calls(enough, length, n_heads_kv=4, direction="backward")


@pytest.mark.parametrize("batch", [2, 8])
def test_items_have_work_enough(batch: int) -> None:
    """The host takes as long as 2^27 operations of each SM for an item, and as for four items before."""
    n_sms, length = torch.cuda.get_device_properties(0).multi_processor_count, 512
    least = -(-(2**27) * n_sms * (batch + 4) // batch // (4 * length * length * 16 * 64))
    assert are_calls(least * length, length, batch=batch)
    assert not are_calls(least * length - length, length, batch=batch)
