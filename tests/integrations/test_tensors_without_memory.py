"""Tensors that hold no values of their own: the operator takes them, or an error names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attention import attention, attention_varlen, forward, sdpa
from flash_attention.cached import attention_cached
from flash_attention.compat.torch_registry import flash_attention_operator
from flash_attention.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attention.run import launch_cache
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
Arguments = dict[str, Any]


def random(*shape: int) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu").half().to(torch.get_default_device())


def batch() -> Arguments:
    return {name: random(1, 64, 2, 64) for name in "qkv"}


def packed() -> Arguments:
    ends = torch.tensor([0, 30, 64]).int()
    given = {name: random(64, 2, 64) for name in "qkv"}
    return {
        **given,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends.clone(),
        "max_seqlen_q": 40,
        "max_seqlen_k": 40,
    }


def cached() -> Arguments:
    cache = {"k": random(4, 16, 2, 64), "v": random(4, 16, 2, 64)}
    table = torch.arange(4).int()[None]
    return {"q": random(1, 4, 2, 64), **cache, "seqused_k": torch.tensor([50]).int(), "block_table": table}


def appended() -> Arguments:
    caches = {"k_cache": random(1, 64, 2, 64), "v_cache": random(1, 64, 2, 64)}
    return {
        "q": random(1, 4, 2, 64), **caches, "k": random(1, 4, 2, 64), "v": random(1, 4, 2, 64),
        "cache_seqlens": torch.tensor([50]).int(),
    }  # fmt: skip


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "attention": (attention, batch),
    "attention with out": (
        attention,
        lambda: batch() | {"out": random(1, 64, 2, 64), "sinks": torch.ones(2)},
    ),
    "attention_varlen": (attention_varlen, packed),
    "attention_varlen with out": (attention_varlen, lambda: packed() | {"out": random(64, 2, 64)}),
    "attention_cached": (attention_cached, cached),
    "flash_attn_func": (flash_attn_func, batch),
    "flash_attn_with_kvcache": (flash_attn_with_kvcache, appended),
    "forward": (lambda **given: forward(CONFIG, **given), lambda: batch() | {"o": random(1, 64, 2, 64)}),
}
PLACES = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name, (_, make) in CALLS.items()
    for argument, x in make().items()
    if isinstance(x, Tensor)
]


@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize(("name", "argument"), PLACES)
def test_storage_that_was_resized_away_is_refused(name: str, argument: str, size: int) -> None:
    call, make = CALLS[name]
    arguments = make()
    if size == 0 or not arguments[argument].is_cuda:
        call(**arguments)  # on a GPU it is now remembered
    else:
        launch_cache.forget()  # a storage that is smaller, but not gone, is seen by new calls alone
    if arguments[argument].untyped_storage().nbytes() <= size:
        size = 1
    arguments[argument].untyped_storage().resize_(size)
    with pytest.raises(ValueError, match=rf"^{argument} cannot be read: its storage holds {size} bytes"):
        call(**arguments)


def test_views_into_storage_that_was_resized_away_are_refused() -> None:
    for size in (0, 1000):
        whole = random(1, 65, 2, 64)
        view = whole[:, 1:]
        launch_cache.forget()
        if size == 0 or not view.is_cuda:
            attention(view, view, view)
        whole.untyped_storage().resize_(size)
        assert view.storage_offset()
        with pytest.raises(ValueError, match=f"^q cannot be read: its storage holds {size} bytes"):
            attention(view, view, view)


def lost(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


def of_whole(values: list[int] | int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Lengths that the host may read, for which they have to be on the CPU."""
    return torch.tensor(values, dtype=dtype, device="cpu")


# What is padded, transposed, unpacked, converted or read before a kernel is called.
BEFORE_THE_CALL: dict[str, tuple[str, Callable[[], Any]]] = {
    "padded": ("q", lambda: flash_attn_func(*3 * [lost(random(1, 4, 2, 12))])),
    "padded, packed sequences": (
        "q",
        lambda: flash_attn_varlen_func(
            *3 * [lost(random(4, 2, 12))], *2 * [torch.tensor([0, 4]).int()], 4, 4
        ),
    ),
    "padded cache": (
        "k_cache",
        lambda: flash_attn_with_kvcache(random(1, 1, 2, 12), *2 * [lost(random(1, 4, 2, 12))]),
    ),
    "unpacked": ("qkv", lambda: flash_attn_qkvpacked_func(lost(random(1, 4, 3, 2, 16)))),
    "unpacked keys": (
        "kv",
        lambda: flash_attn_kvpacked_func(random(1, 4, 2, 16), lost(random(1, 4, 2, 2, 16))),
    ),
    "transposed": ("query", lambda: sdpa(*3 * [lost(random(1, 2, 4, 16))])),
    "flattened": ("query", lambda: sdpa(*3 * [lost(random(2, 3, 2, 4, 16).transpose(0, 1))])),
    "PyTorch's operator": ("query", lambda: flash_attention_operator(*3 * [lost(random(1, 2, 4, 16))])),
    "a factor": (
        "softmax_scale",
        lambda: attention(**batch(), softmax_scale=lost(of_whole(1, torch.float32))),
    ),
    "a cap": ("softcap", lambda: attention(**batch(), softcap=lost(of_whole(1, torch.float32)))),
    "a window": (
        "window_size",
        lambda: flash_attn_func(*batch().values(), window_size=lost(of_whole([1, 2]))),
    ),
    "a length": (
        "max_seqlen_q",
        lambda: flash_attn_varlen_func(**packed() | {"max_seqlen_q": lost(of_whole(40))}),
    ),
}


@pytest.mark.parametrize("case", BEFORE_THE_CALL)
def test_storage_that_was_resized_away_is_refused_before_anything_is_made_of_it(case: str) -> None:
    name, call = BEFORE_THE_CALL[case]
    with pytest.raises(ValueError, match=rf"^{name} cannot be read: its storage holds 0 bytes"):
        call()


def test_storage_that_was_resized_away_is_refused_before_autocast_converts_it() -> None:
    x = random(1, 4, 2, 16)
    with torch.autocast(x.device.type, torch.bfloat16), pytest.raises(ValueError, match=r"^k cannot be read"):
        attention(x, lost(x.float()), x)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "forward"])
def test_functionalized_calls_give_the_same(name: str) -> None:
    """Wrappers, whose address is 0, go to the operator; what is written in place is written."""
    call, make = CALLS[name]
    names = [n for n, x in make().items() if isinstance(x, Tensor)]
    numbers = {n: x for n, x in make().items() if not isinstance(x, Tensor)}

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, tensors, strict=True))
        out = call(**given, **numbers)
        return out, *(x for x in given.values() if x.is_floating_point())

    expected = run(*(make()[n] for n in names))
    got = torch.func.functionalize(run)(*(make()[n] for n in names))
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_a_wrapper_of_functionalization_goes_to_the_operator() -> None:
    x = random(1, 64, 2, 64)
    wrapped = torch._to_functional_tensor(x)
    assert wrapped.data_ptr() == 0
    expected, outs = attention(x, x, x), []
    torch._enable_functionalization(reapply_views=False)
    try:
        # Of plain tensors, too, what is made meanwhile would be a wrapper.
        for given in (wrapped, x):
            out = attention(given, given, given)
            assert torch._is_functional_tensor(out) == (given is wrapped)
            outs.append(torch._from_functional_tensor(out) if given is wrapped else out)
    finally:
        torch._disable_functionalization()
    assert all(torch.equal(out, expected) for out in outs)


def test_forward_refuses_wrappers() -> None:
    x = random(1, 64, 2, 64)
    with pytest.raises(ValueError, match=r"^k cannot be read"):
        forward(CONFIG, x, torch._to_functional_tensor(x), x)


def test_tensors_of_other_transforms() -> None:
    """Under torch.func.grad, tensors of which no gradient is wanted go to the operator."""
    x = random(1, 64, 2, 64)
    seen = []

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            seen.append(attention(x, x, x))
        return x.float().sum()

    torch.func.grad(loss)(x)
    assert len(seen) == 1
    assert torch.func.grad(lambda x: attention(x, x, x).float().square().sum())(x).any()
    with pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda x: attention(x, x, x), (x,), (x,))
    with pytest.raises(NotImplementedError, match=r"torch\.vmap"):
        torch.func.vmap(lambda x: attention(x, x, x))(x[None])


@pytest.mark.parametrize("call", [attention, sdpa, flash_attn_func])
def test_fake_and_meta_tensors_give_the_like(call: Callable[..., Tensor]) -> None:
    x = random(1, 64, 2, 64)
    expected = call(x, x, x)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for like in (fake, x.to("meta")):
        out = call(like, like, like)
        assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)
    with pytest.raises(ValueError, match="device"):
        call(x, x.to("meta"), x)
