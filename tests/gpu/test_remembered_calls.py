"""Calls made before: the short way gives the bits of the long way and refuses what it must."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from gpu_cases import CONFIG

from flash_attention import api, attention, attention_varlen, backward, forward, last_kernel
from flash_attention.backends.cuda import device_facts_of
from flash_attention.cached import attention_cached
from flash_attention.run import gradients, launch_cache, passes
from flash_helpers.kernel_configs import DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD

D = 128


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).half()


def tensors(seed: int, seq_q: int, seq_k: int, heads: int, heads_kv: int, batch: int = 2, d: int = D) -> list:
    shapes = ((batch, seq_q, heads, d), (batch, seq_k, heads_kv, d), (batch, seq_k, heads_kv, d))
    return [normal(*shape, seed=3 * seed + i) for i, shape in enumerate(shapes)]


def packed(seed: int) -> tuple[Any, ...]:
    ends = torch.tensor([0, 100, 100, 257], dtype=torch.int32, device="cuda")
    q, k, v = (x[0] for x in tensors(seed, 257, 257, 4, 2, batch=1))
    return q, k, v, ends, ends.clone(), 157, 157


def cached(seed: int) -> tuple[Any, ...]:
    used = torch.tensor([300, 1 + seed], dtype=torch.int32, device="cuda")
    return (*tensors(seed, 1, 4096, 8, 2), used)


def paged(seed: int) -> tuple[Any, ...]:
    q, k, v, used = cached(seed)
    k, v = (x.view(512, 16, 2, D) for x in (k, v))
    generator = torch.Generator("cuda").manual_seed(seed)
    table = torch.randperm(512, device="cuda", generator=generator).int().view(2, 256)
    return q, k, v, used, table


def transposed(seed: int) -> list:
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(seed, 200, 200, 4, 4)]


CALLS: dict[str, tuple[Any, Any]] = {
    "forward": (lambda *x: forward(CONFIG, *x), lambda s: tensors(s, 128, 128, 4, 4, d=CONFIG.d_head)),
    "plain": (attention, lambda s: tensors(s, 200, 300, 4, 2)),
    "lse": (lambda *x: attention(*x, causal=True, return_lse=True), lambda s: tensors(s, 200, 300, 4, 2)),
    "window": (lambda *x: attention(*x, window=(40, 3), softcap=20.0), lambda s: tensors(s, 200, 300, 4, 2)),
    "scale": (lambda *x: attention(*x, softmax_scale=0.3), lambda s: tensors(s, 200, 300, 4, 2)),
    "padded head": (attention, lambda s: tensors(s, 200, 300, 4, 2, d=72)),
    "sinks": (
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks),
        lambda s: [*tensors(s, 200, 300, 4, 2), normal(4, seed=s).float()],
    ),
    "transposed": (attention, transposed),
    "one query": (lambda *x: attention(*x, return_lse=True), lambda s: tensors(s, 1, 8192, 8, 2)),
    "one query, window": (lambda *x: attention(*x, window=(999, 0)), lambda s: tensors(s, 1, 8192, 8, 2)),
    "packed": (lambda *x: attention_varlen(*x, causal=True, return_lse=True), packed),
    "cached": (attention_cached, cached),
    "paged": (lambda *x: attention_cached(*x[:4], block_table=x[4], return_lse=True), paged),
}


@pytest.mark.parametrize("name", CALLS)
def test_short_way_gives_the_bits_of_the_long_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, inputs = CALLS[name]
    expected = []
    for seed in range(3):
        launch_cache.forget()
        expected.append(call(*inputs(seed)))
    kernel = last_kernel()
    launch_cache.forget()
    call(*inputs(9))
    for module, function in ((passes, "choose"), (api.checks, "check_forward")):
        monkeypatch.setattr(module, function, lambda *a, **kw: pytest.fail("the long way"))
    for seed in range(3):
        found = call(*inputs(seed))
        pairs = (
            [(found, expected[seed])]
            if isinstance(found, torch.Tensor)
            else zip(found, expected[seed], strict=True)
        )
        for x, y in pairs:
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            assert torch.equal(x, y)
    assert last_kernel() == kernel


def test_given_output() -> None:
    q, k, v = tensors(0, 200, 300, 4, 2)
    expected, out = attention(q, k, v), torch.empty_like(q)
    for _ in range(2):
        out.fill_(float("nan"))
        assert attention(q, k, v, out=out) is out
        assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=q)


def test_what_is_checked_in_every_call() -> None:
    q, k, v = tensors(0, 200, 300, 4, 2)
    attention(q, k, v)
    assert attention(q.clone().requires_grad_(), k, v).requires_grad
    with pytest.raises(TypeError, match="element types"):
        attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="on one device"):
        attention(q, k.cpu(), v)
    assert torch.isfinite(attention(q, k, v)).all()


def test_the_callers_stream_and_graphs() -> None:
    q, k, v = tensors(0, 200, 300, 4, 2)
    expected, stream = attention(q, k, v), torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        found = attention(late, k, v)
    stream.synchronize()
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(late, k, v)
    late.copy_(normal(*q.shape, seed=77))
    graph.replay()
    assert torch.equal(captured, attention(late, k, v))


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = tensors(0, 200, 300, 4, 2)
    expected = attention(*inputs)
    for _ in range(2):
        found = attention(*(x.to("cuda:1") for x in inputs))
        assert found.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert torch.equal(found.to("cuda:0"), expected)


def test_memory_does_not_grow() -> None:
    inputs = tensors(0, 1, 4096, 8, 2)
    attention(*inputs)
    before = torch.cuda.memory_allocated()
    for _ in itertools.repeat(None, 100):
        attention(*inputs, return_lse=True)
    assert torch.cuda.memory_allocated() == before


# ---------------------------------------------------------------- tensors that lost their memory
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("offset", [0, 64])
def test_a_tensor_that_lost_its_memory_is_refused(place: int, offset: int) -> None:
    given = tensors(0, 256, 256, 4, 4)
    attention(*given)
    numbers = torch.zeros(given[place].numel() + offset, dtype=torch.float16, device="cuda")
    given[place] = numbers[offset:].view(given[place].shape)
    right = attention(*given)
    numbers.untyped_storage().resize_(0)
    with pytest.raises(ValueError):  # noqa: PT011, the check that sees it first says it
        attention(*given)
    torch.cuda.synchronize()
    numbers.untyped_storage().resize_(2 * numbers.numel())
    numbers.zero_()
    assert torch.equal(attention(*given), right)


# ---------------------------------------------------------------------- gradients
def differentiated(call: Any, given: Any, dlse: bool = False) -> list[torch.Tensor]:
    """Results and gradients of a call; all floating tensors are leaves."""
    leaves = [
        x.detach().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for x in given
    ]
    found = call(*leaves)
    out, lse = found if isinstance(found, tuple) else (found, None)
    roots = [out] if lse is None or not dlse else [out, lse]
    given_gradients = [normal(*x.shape, seed=7 + i).to(x.dtype) for i, x in enumerate(roots)]
    wanted = [x for x in leaves if torch.is_tensor(x) and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(roots, wanted, given_gradients)]


REPEATABLE = {"deterministic": True}
GRADIENTS: dict[str, tuple[Any, Any]] = {
    "plain": (lambda *x: attention(*x, **REPEATABLE), lambda s: tensors(s, 200, 300, 4, 2)),
    "causal": (lambda *x: attention(*x, causal=True, **REPEATABLE), lambda s: tensors(s, 256, 256, 4, 4)),
    "lse": (
        lambda *x: attention(*x, causal=True, return_lse=True, **REPEATABLE),
        lambda s: tensors(s, 200, 300, 4, 2),
    ),
    "window": (
        lambda *x: attention(*x, window=(40, 3), softcap=20.0, softmax_scale=0.1, **REPEATABLE),
        lambda s: tensors(s, 200, 300, 4, 2),
    ),
    "padded head": (lambda *x: attention(*x, **REPEATABLE), lambda s: tensors(s, 200, 300, 4, 2, d=72)),
    "sinks": (
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **REPEATABLE),
        lambda s: [*tensors(s, 200, 300, 4, 2), normal(4, seed=s).float()],
    ),
    "transposed": (lambda *x: attention(*x, **REPEATABLE), transposed),
    "packed": (lambda *x: attention_varlen(*x, causal=True, **REPEATABLE), packed),
    "cached": (lambda *x: attention_cached(*x, **REPEATABLE), cached),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_short_way_gives_the_gradients_of_the_long_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, inputs = GRADIENTS[name]
    dlse, expected = name == "lse", []
    for seed in range(3):
        launch_cache.forget()
        expected.append(differentiated(call, inputs(seed), dlse))
    launch_cache.forget()
    differentiated(call, inputs(9), dlse)
    for function in ("choose", "choose_with_gradients", "backward_pass"):
        monkeypatch.setattr(passes, function, lambda *a, **kw: pytest.fail("the long way"))
    monkeypatch.setattr(gradients, "backward_pass", passes.backward_pass)
    for seed in range(3):
        for x, y in zip(differentiated(call, inputs(seed), dlse), expected[seed], strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            assert torch.equal(x, y)


def test_other_gradients_are_other_passes() -> None:
    """Which are wanted, whether they have to repeat, what the loss uses: each has a launch of its own."""
    q, k, v = (x.requires_grad_() for x in tensors(0, 200, 300, 4, 2))
    dout = normal(2, 200, 4, D, seed=5)

    def every() -> dict[str, torch.Tensor]:
        out = attention(q, k, v, deterministic=True)
        return dict(zip("qkv", torch.autograd.grad(out, (q, k, v), dout), strict=True))

    expected = every()
    for names in ("q", "k", "v", "qk", "kv", "qkv", "q"):
        wanted = [{"q": q, "k": k, "v": v}[name] for name in names]
        inputs = [x if name in names else x.detach() for name, x in (("q", q), ("k", k), ("v", v))]
        for _ in range(2):
            found = torch.autograd.grad(attention(*inputs, deterministic=True), wanted, dout)
            for name, x in zip(names, found, strict=True):
                assert torch.equal(x, expected[name]), (names, name)
    for _ in range(2):
        _, lse = attention(q, k, v, return_lse=True, deterministic=True)
        dv = torch.autograd.grad(lse.sum(), v)[0]
        assert not dv.any()
    for x, y in zip(every().values(), expected.values(), strict=True):
        assert torch.equal(x, y)


def test_pytorchs_switch_is_seen_in_every_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(0, 300, 300, 4, 2))
    asked = []
    known = launch_cache.repeat_gradients
    monkeypatch.setattr(
        launch_cache, "repeat_gradients", lambda key, *given: asked.append(key[4]) or known(key, *given)
    )
    for switch in (False, False, True, True, False):
        out = attention(q, k, v)
        torch.use_deterministic_algorithms(switch)
        try:
            out.backward(torch.ones_like(out))
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, False, True, True, False]


def test_a_tensor_that_was_changed_in_between_is_an_error() -> None:
    for _ in range(3):  # the last passes are remembered
        for place in range(3):
            leaves = tensors(0, 200, 300, 4, 2)
            given = [x.requires_grad_() * 1 for x in leaves]
            out = attention(*given)
            given[place].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            out = attention(*leaves)
            out.backward(torch.ones_like(out))


def test_gradients_on_the_stream_of_the_forward_pass() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(0, 500, 500, 4, 4))
    dout = normal(2, 500, 4, D, seed=5)
    expected = torch.autograd.grad(attention(q, k, v, deterministic=True), (q, k, v), dout)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(other):
            torch.cuda._sleep(2_000_000)
            late = q * 1  # is there when the stream has woken
            found = torch.autograd.grad(attention(late, k, v, deterministic=True), (late, k, v), dout)
        other.synchronize()
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y)


def test_remembered_gradients_take_no_more_memory() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(0, 512, 512, 4, 4))
    dout = normal(2, 512, 4, D, seed=5)

    def peak() -> int:
        torch.cuda.synchronize()
        time.sleep(0.05)  # autograd's thread lets go of a call's gradients a little after they are returned
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    launch_cache.forget()
    first = peak()
    assert [peak() for _ in range(3)] == [first] * 3


def test_kernels_that_are_named_are_remembered_apart() -> None:
    """Each family's repeatable kernel in turn: the bits are those of the kernel that is called by name."""
    facts = device_facts_of()
    configs = {
        direction.label: kernel.config
        for direction in directions(BACKWARD)
        for kernel in direction.built()
        if kernel.config.deterministic
        and (kernel.config.dtype, kernel.config.d_head, kernel.config.d_head_v) == (DType.FP16, D, D)
        and kernel.config.infeasible_reason(facts) is None
    }
    q, k, v = (x.requires_grad_() for x in tensors(0, 200, 300, 4, 2))
    dout = normal(2, 200, 4, D, seed=5)
    with torch.no_grad():
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        expected = {
            name: backward(config, dout, *(x.detach() for x in (q, k, v)), out, lse, causal=True)
            for name, config in configs.items()
        }
    for _ in range(3):
        for name, config in configs.items():
            found = torch.autograd.grad(
                attention(q, k, v, causal=True, backward_config=config), (q, k, v), dout
            )
            for x, y in zip(found, expected[name], strict=True):
                assert torch.equal(x, y), name
