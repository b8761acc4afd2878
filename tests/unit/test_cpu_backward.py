"""The backward pass of the CPU backend against float64, and what it must leave exactly zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.backends import cpu, cpu_backward
from flash_attention.backends.cpu_backward import Gradients
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig
from flash_helpers.test.gradients import check_gradients
from flash_helpers.test.reference import reference, reference_gradients

CONFIG = FlashForwardKernelConfig(DType.BF16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
NAMES = ("dq", "dk", "dv", "dsinks")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, fewer keys": {"causal": True, "seq_len_q": 150, "seq_len_k": 70},
    "causal, more keys": {"causal": True, "seq_len_q": 33, "seq_len_k": 200},
    "window": {"window": (40, 3)},
    "window to the left": {"window": (20, None)},
    "far window": {"window": (10, 0), "seq_len_q": 30, "seq_len_k": 300},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "sinks, causal, fewer keys": {"sinks": True, "causal": True, "seq_len_q": 150, "seq_len_k": 70},
    "grouped heads": {"n_heads": 6, "n_heads_kv": 2},
    "one key": {"seq_len_k": 1},
    "one query": {"seq_len_q": 1, "causal": True},
    "head sizes 40/72": {"d_head": 40, "d_head_v": 72},
    "negative scale": {"softmax_scale": -0.3},
    "zero scale": {"softmax_scale": 0.0},
    "everything": {
        "causal": True, "window": (90, None), "softcap": 3.0, "sinks": True, "n_heads": 4, "n_heads_kv": 2,
        "d_head": 24, "d_head_v": 56, "seq_len_q": 100, "seq_len_k": 180,
    },
}  # fmt: skip


class Call:
    """Inputs of a case, and both passes of the backend."""

    def __init__(
        self,
        seq_len_q: int = 130,
        seq_len_k: int = 130,
        n_heads: int = 2,
        n_heads_kv: int = 2,
        d_head: int = 64,
        d_head_v: int | None = None,
        sinks: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        d_head_v = d_head if d_head_v is None else d_head_v

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = randn(2, seq_len_q, n_heads, d_head).to(dtype)
        self.k = randn(2, seq_len_k, n_heads_kv, d_head).to(dtype)
        self.v = randn(2, seq_len_k, n_heads_kv, d_head_v).to(dtype)
        self.dout = randn(2, seq_len_q, n_heads, d_head_v).to(dtype)
        self.dlse = randn(2, n_heads, seq_len_q)
        self.sinks = randn(n_heads) if sinks else None
        self.options = options
        scale = options.get("softmax_scale")
        left, right = options.get("window", (None, None))
        if options.get("causal"):
            right = 0
        self.scale = d_head**-0.5 if scale is None else scale
        self.limits = {"left": left, "right": right, "softcap": options.get("softcap", 0.0)}

    def forward(self) -> tuple[Tensor, Tensor]:
        out = self.dout.new_empty(self.dout.shape)
        lse = torch.empty(self.dlse.shape)
        cpu.attention(
            CONFIG, self.q, self.k, self.v, out, lse, self.scale, sinks=self.sinks, **self.limits
        )  # fmt: skip
        return out, lse

    def backward(self, dlse: Tensor | None = None, wanted: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
        out, lse = self.forward()
        like = {"dq": self.q, "dk": self.k, "dv": self.v, "dsinks": self.sinks}
        grads = {name: torch.full_like(like[name], math.nan) for name in wanted if like[name] is not None}
        cpu_backward.backward(
            CONFIG, self.dout, self.q, self.k, self.v, out, lse, dlse, self.scale, Gradients(**grads),
            sinks=self.sinks, **self.limits,
        )  # fmt: skip
        return grads

    def expected(self, dlse: Tensor | None = None) -> dict[str, Tensor]:
        grads = reference_gradients(self.q, self.k, self.v, self.dout, dlse, sinks=self.sinks, **self.options)
        return {name: value for name, value in grads._asdict().items() if value is not None}


@pytest.mark.parametrize("with_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_exact_as_eager_ones(case: str, dtype: torch.dtype, with_lse: bool) -> None:
    call = Call(dtype=dtype, **CASES[case])
    dlse = call.dlse if with_lse else None
    check_gradients(
        call.backward(dlse),
        call.q,
        call.k,
        call.v,
        call.dout,
        dlse,
        out=call.forward()[0],
        sinks=call.sinks,
        **call.options,
    )


def test_the_reference_is_the_derivative_of_the_reference() -> None:
    """Finite differences, with all that has a gradient: options, sinks, output and LSE."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 5, 2, 3), (1, 7, 1, 3), (1, 7, 1, 4), (2,))
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return reference(q, k, v, causal=True, window=(4, None), softcap=1.5, sinks=sinks)

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs])
    dout, dlse = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((1, 5, 2, 4), (1, 2, 5)))
    out, lse = call(*inputs)
    loss = (out * dout).sum() + (lse * dlse).sum()
    q, k, v, sinks = inputs
    grads = reference_gradients(q, k, v, dout, dlse, sinks=sinks, causal=True, window=(4, None), softcap=1.5)
    for given, right in zip(grads, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(given, right)


@pytest.mark.parametrize("case", ["plain", "causal, fewer keys", "sinks", "everything"])
def test_a_loss_of_the_lse_alone_gives_v_no_gradient(case: str) -> None:
    call = Call(**CASES[case])
    call.dout.zero_()
    found, expected = call.backward(call.dlse), call.expected(call.dlse)
    assert not found["dv"].any()
    for name in ("dq", "dk"):
        torch.testing.assert_close(found[name].double(), expected[name], atol=2e-2, rtol=2e-2)


def test_a_gradient_of_zero_of_the_lse_changes_no_bit() -> None:
    call = Call(**CASES["everything"])
    with_zeros = call.backward(torch.zeros_like(call.dlse))
    for name, grad in call.backward().items():
        assert torch.equal(grad, with_zeros[name])


@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dsinks",), ("dq", "dv"), ()], ids=str)
def test_only_the_gradients_that_are_wanted_are_computed(wanted: tuple[str, ...]) -> None:
    call = Call(**CASES["everything"])
    every = call.backward()
    some = call.backward(wanted=wanted)
    assert set(some) == set(wanted)
    for name in wanted:
        assert torch.equal(some[name], every[name])


def test_keys_that_nobody_sees_and_queries_that_see_none_get_zeros_and_may_hold_nan() -> None:
    unseen = Call(window=(10, 0), seq_len_q=30, seq_len_k=300)
    clean = unseen.backward()
    unseen.k[:, :260], unseen.v[:, :260] = math.nan, math.nan  # the first query stands at 270
    found = unseen.backward()
    for name in ("dq", "dk", "dv"):
        assert torch.equal(found[name], clean[name])
    assert not found["dk"][:, :260].any()
    assert not found["dv"][:, :260].any()
    blind = Call(causal=True, seq_len_q=150, seq_len_k=70)
    clean = blind.backward()
    blind.q[:, :80], blind.dout[:, :80] = math.nan, math.nan
    found = blind.backward()
    for name in ("dq", "dk", "dv"):
        assert torch.equal(found[name], clean[name])
    assert not found["dq"][:, :80].any()


def test_no_keys_and_no_queries() -> None:
    for sizes in ({"seq_len_k": 0}, {"seq_len_q": 0}):
        grads = Call(**sizes, sinks=True).backward()
        assert all(not grad.any() for grad in grads.values())


def test_long_sequences_are_taken_in_several_chunks() -> None:
    """More rows than one chunk holds: sums of dK and dV go over the chunks."""
    call = Call(seq_len_q=5000, seq_len_k=60, n_heads=2, n_heads_kv=1, d_head=16)
    found, expected = call.backward(), call.expected()
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(found[name].double(), expected[name], atol=3e-2, rtol=3e-2)
