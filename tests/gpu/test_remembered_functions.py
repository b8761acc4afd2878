"""Calls with functions of scores and masks, made before: the bits of the long way; changes are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention
from flash_attention.mods import and_masks, dense_bias
from flash_attention.run import gradients, launch_cache, passes

SEQ, HEADS, D = 2500, 4, 64  # long enough for bits of tiles


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").half().cuda()


def tensors(seed: int, **options: bool) -> list[Tensor]:
    return [normal(1, SEQ, HEADS, D, seed=3 * seed + i).requires_grad_(**options) for i in range(3)]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def alibi(slopes: Tensor) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, q, k: s + slopes[h] * (k - q)}


def documents(document: Tensor) -> dict[str, Any]:
    return {"mask_mod": and_masks(causal, lambda b, h, q, k: document[q] == document[k])}


def prefix(length: int) -> dict[str, Any]:
    return {"mask_mod": lambda b, h, q, k: (q >= k) | (k < length)}


def biased(bias: Tensor) -> dict[str, Any]:
    return {"score_mod": dense_bias(bias)}


def slopes_of(seed: int) -> Tensor:
    return normal(HEADS, seed=seed).float().abs() / 8


# Functions of what they hold, and what they hold, by a seed.
FUNCTIONS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[int], Any]]] = {
    "ALiBi": (alibi, slopes_of),
    "documents": (documents, lambda seed: (torch.arange(SEQ) // (300 + 200 * seed)).cuda()),
    "classes": (documents, lambda seed: ((torch.arange(SEQ) // (300 + 200 * seed)) % 3).cuda()),  # no runs
    "prefix": (prefix, lambda seed: 100 + 700 * seed),
    "bias": (biased, lambda seed: normal(HEADS, SEQ, SEQ, seed=seed)),
    "ALiBi of a parameter": (alibi, lambda seed: torch.nn.Parameter(slopes_of(seed), requires_grad=False)),
}


def no_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in ("choose", "choose_with_gradients", "backward_pass"):
        monkeypatch.setattr(passes, function, lambda *a, **kw: pytest.fail("the long way"))
    monkeypatch.setattr(gradients, "backward_pass", passes.backward_pass)


def result(options: dict[str, Any], seed: int, *, differentiated: bool) -> list[Tensor]:
    q, k, v = tensors(seed, requires_grad=differentiated)
    out = attention(q, k, v, deterministic=True, **options)
    if not differentiated:
        return [out]
    return [out, *torch.autograd.grad(out, (q, k, v), normal(*out.shape, seed=77))]


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_short_way_gives_the_bits_of_the_long_way(
    name: str, differentiated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, held = FUNCTIONS[name]
    own = [made(held(seed)) for seed in range(3)]
    expected = []
    for seed, options in enumerate(own):
        launch_cache.forget()
        expected.append(result(options, seed, differentiated=differentiated))
    launch_cache.forget()
    for seed, options in enumerate(own):  # the first call of a function is seen, the second is remembered
        for _ in range(2):
            result(options, seed, differentiated=differentiated)
    no_long_way(monkeypatch)
    for seed, options in enumerate(own):
        for _ in range(2):
            with torch.device("cuda"):  # a function mode
                found = result(options, seed, differentiated=differentiated)
            for x, y in zip(found, expected[seed], strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
                assert torch.equal(x, y)


def changes() -> dict[str, Callable[[Tensor], None]]:
    def take_other_memory(x: Tensor) -> None:
        x.set_(x.flip(0).contiguous())

    def write(x: Tensor) -> None:
        x.copy_(x.flip(0))

    def write_a_part(x: Tensor) -> None:
        x[1:2].fill_(-1)

    return {"memory": take_other_memory, "contents": write, "one element": write_a_part}


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("change", changes())
@pytest.mark.parametrize("name", ["ALiBi", "documents", "classes"])
def test_what_changes_in_a_captured_tensor_is_seen(name: str, change: str, differentiated: bool) -> None:
    made, held = FUNCTIONS[name]
    tensor = held(2)
    options = made(tensor)
    for _ in range(3):
        before = result(options, 0, differentiated=differentiated)
    changes()[change](tensor)
    for _ in range(3):
        found = result(options, 0, differentiated=differentiated)
        right = result(made(tensor.clone()), 0, differentiated=differentiated)
        for x, y in zip(found, right, strict=True):
            assert torch.equal(x, y)
    assert not torch.equal(found[0], before[0])


def test_a_longer_tensor_of_another_type_is_seen() -> None:
    slopes = slopes_of(0)
    for _ in range(3):
        result(alibi(slopes), 0, differentiated=True)
    for other in (slopes.half(), torch.cat([slopes, slopes])[::2], slopes[:2]):
        for _ in range(3):
            slopes.data = other
            found = result(alibi(slopes), 0, differentiated=True)
        for x, y in zip(found, result(alibi(other.clone()), 0, differentiated=True), strict=True):
            assert torch.equal(x, y)


def test_a_tensor_in_the_place_of_another_is_seen() -> None:
    """Documents of one batch after the other, where the allocator puts each where the one before lay."""
    places = set()
    for n in range(6):
        document = (torch.arange(SEQ) // (200 + 150 * n)).cuda()
        places.add(document.data_ptr())
        options = documents(document)
        for _ in range(3):
            found = result(options, 0, differentiated=False)
        right = result(documents(document.clone()), 0, differentiated=False)
        assert torch.equal(found[0], right[0])
        del document, options
    assert len(places) < 6


def test_gradients_with_functions_on_other_streams_and_in_graphs() -> None:
    """Each backward launch finds bits of tiles in a workspace of its own."""
    document = (torch.arange(SEQ) // 500 % 3).cuda()  # no runs, so that bits are found
    options = documents(document)
    expected = result(options, 0, differentiated=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(result(options, 0, differentiated=True))
    torch.cuda.synchronize()
    for each in found:
        for x, y in zip(each, expected, strict=True):
            assert torch.equal(x, y)
    q, k, v = tensors(0, requires_grad=True)
    dout = normal(*q.shape, seed=77)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, deterministic=True, **options)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    document.copy_(torch.arange(SEQ, device="cuda") // 900 % 2)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip([out, *grads], result(documents(document.clone()), 0, differentiated=True), strict=True):
        assert torch.equal(x, y)
