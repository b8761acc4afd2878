"""The host side of the backward pass on a GPU, with a kernel of this file that reads the host's memory.

It gets addresses, strides and workspaces as a compiled kernel does, and takes the steps of the CPU backend.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention
from flash_attention.backends import cpu_backward, cuda_backward
from flash_attention.backends.cpu_backward import Gradients
from flash_attention.backward_call import BackwardCall
from flash_attention.call import Mask, Scores
from flash_attention.layouts import Cached, Packed
from flash_helpers.kernel_configs import DType
from flash_helpers.kernels.arguments import UNBOUNDED, BackwardArguments
from flash_helpers.kernels.families import directions, kernel_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.select.select import Choice
from flash_helpers.test.gradients import check_gradients

CONFIGS = (kernel.config for kernel in directions(BACKWARD)[0].built())
CONFIG = next(c for c in CONFIGS if (c.dtype, c.d_head, c.d_head_v) == (DType.FP16, 64, 64))
DTYPE = CONFIG.dtype.to_torch_dtype()
SIZES = (4096, 0, 512)  # bytes of the workspaces that the kernel of this file asks for


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that lies at an address."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


class HostKernel:
    """What a loaded kernel offers, on the host. Dense problems, and packed ones of a single sequence."""

    def __init__(self) -> None:
        self.calls: list[BackwardArguments] = []
        self.workspace: tuple[int, ...] = ()

    def workspaces(self, arguments: BackwardArguments) -> tuple[int, int, int]:
        return SIZES

    def launch(self, arguments: BackwardArguments, stream: int, delta: int, *workspace: int) -> None:
        self.calls.append(arguments)
        self.workspace = (delta, *workspace)
        a = arguments
        rows_q, rows_k = (a.batch, a.seq_len_q), (a.batch, a.seq_len_k)
        q, o, dout = (
            at(x, (*rows_q, a.n_heads, d), strides, DTYPE)
            for x, d, strides in (
                (a.q, a.d_head, a.q_strides),
                (a.o, a.d_head_v, a.o_strides),
                (a.dout, a.d_head_v, a.dout_strides),
            )
        )
        k, v = (
            at(x, (*rows_k, a.n_heads_kv, d), strides, DTYPE)
            for x, d, strides in ((a.k, a.d_head, a.k_strides), (a.v, a.d_head_v, a.v_strides))
        )
        total = a.total_q or a.seq_len_q
        rows = (a.batch, a.n_heads, a.seq_len_q), (a.n_heads * total, total, 1)
        lse = at(a.lse, *rows, torch.float32)
        dlse = at(a.dlse, *rows, torch.float32) if a.dlse else None
        at(delta, *rows, torch.float32).copy_(cpu_backward.delta_of(dout, o, lse, dlse))
        dq = at(a.dq, (*rows_q, a.n_heads, a.d_head), a.dq_strides, DTYPE) if a.dq else None
        dk = at(a.dk, (*rows_k, a.n_heads_kv, a.d_head), a.dk_strides, DTYPE) if a.dk else None
        dv = at(a.dv, (*rows_k, a.n_heads_kv, a.d_head_v), a.dv_strides, DTYPE) if a.dv else None
        left, right = (None if n == UNBOUNDED else n for n in (a.window_left, a.window_right))
        cpu_backward.backward(
            CONFIG, dout, q, k, v, o, lse, dlse, a.softmax_scale, Gradients(dq, dk, dv),
            left=left, right=right, softcap=a.softcap,
        )  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostKernel:
    """The kernel of this file in the place of each compiled one."""
    kernel = HostKernel()
    functions = cuda_backward.Functions(kernel.launch, kernel.workspaces)
    monkeypatch.setattr(cuda_backward, "_functions", {-1: AnyKernel(functions)})
    monkeypatch.setattr(cuda_backward, "current_device", lambda: -1)
    monkeypatch.setattr(cuda_backward, "current_stream", lambda index: 0)
    return kernel


class AnyKernel(dict):
    """Gives the same functions for every kernel."""

    def __init__(self, functions: cuda_backward.Functions) -> None:
        self.functions = functions

    def __getitem__(self, kernel: Kernel) -> cuda_backward.Functions:
        return self.functions


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


class Inputs:
    """Tensors of a dense call and what its forward pass returns."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor | None = None, **options: Any
    ):
        self.q, self.k, self.v, self.dout, self.sinks, self.options = q, k, v, dout, sinks, options
        self.out, self.lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
        right = 0 if options.get("causal") else None
        scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
        self.mask, self.scores = Mask(None, right), Scores(scale, options.get("softcap", 0.0), sinks)

    def call(self, dlse: Tensor | None = None, **gradients: Tensor | None) -> BackwardCall:
        new = {"dq": self.q, "dk": self.k, "dv": self.v, "dsinks": self.sinks}
        for name, like in new.items():
            if name not in gradients:
                gradients[name] = None if like is None else torch.full_like(like, math.nan)
        dq, dk, dv, dsinks = (gradients[name] for name in new)
        return BackwardCall(
            self.q,
            self.k,
            self.v,
            self.out,
            self.lse,
            self.dout,
            dlse,
            dq,
            dk,
            dv,
            dsinks,
            self.mask,
            self.scores,
        )

    def check(self, call: BackwardCall) -> None:
        found = {name: x for name in ("dq", "dk", "dv", "dsinks") if (x := getattr(call, name)) is not None}
        check_gradients(
            found, self.q, self.k, self.v, self.dout, call.dlse, out=self.out, sinks=self.sinks,
            **self.options,
        )  # fmt: skip


def run(call: BackwardCall, **features: bool) -> None:
    cuda_backward.run_backward(call, Choice(kernel_of(CONFIG, **features), "a test"))


def dense(d: int = 64, d_v: int = 64, **options: Any) -> Inputs:
    return Inputs(
        randn(2, 30, 4, d), randn(2, 50, 2, d, seed=1), randn(2, 50, 2, d_v, seed=2),
        randn(2, 30, 4, d_v, seed=3),
        **options,
    )  # fmt: skip


def test_what_a_kernel_can_reach_is_handed_over_as_it_is(host: HostKernel) -> None:
    inputs = dense(causal=True, softcap=4.0)
    call = inputs.call(dlse=torch.randn(2, 4, 30))
    run(call, causal=True, softcap=True)
    inputs.check(call)
    (seen,) = host.calls
    assert (seen.q, seen.k, seen.v) == (inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr())
    assert (seen.o, seen.dout) == (inputs.out.data_ptr(), inputs.dout.data_ptr())
    assert (seen.lse, seen.dlse) == (inputs.lse.data_ptr(), call.dlse.data_ptr())
    assert (seen.dq, seen.dk, seen.dv) == (call.dq.data_ptr(), call.dk.data_ptr(), call.dv.data_ptr())
    assert seen.q_strides == inputs.q.stride()
    assert (seen.batch, seen.seq_len_q, seen.seq_len_k, seen.n_heads, seen.n_heads_kv) == (2, 30, 50, 4, 2)
    assert (seen.window_left, seen.window_right, seen.softcap) == (UNBOUNDED, 0, 4.0)


def test_workspaces_have_the_sizes_that_the_kernel_asks_for_and_do_not_overlap(host: HostKernel) -> None:
    run(dense().call())
    delta, lse_log2, dq_sums, counters = host.workspace
    assert dq_sums == 0  # none of it is wanted
    assert all(x % 64 == 0 for x in host.workspace)
    assert lse_log2 - delta >= 2 * 4 * 30 * 4
    assert counters - lse_log2 >= SIZES[0]


@pytest.mark.parametrize("sizes", [(40, 40), (64, 24), (8, 64)])
@pytest.mark.parametrize("padded_head", [False, True])
def test_smaller_heads_are_padded_unless_the_kernel_reads_beyond_them(
    host: HostKernel, sizes: tuple[int, int], padded_head: bool
) -> None:
    inputs = dense(*sizes, causal=True)
    call = inputs.call()
    run(call, causal=True, padded_head=padded_head)
    inputs.check(call)
    seen = host.calls[0]
    assert (seen.d_head, seen.d_head_v) == (sizes if padded_head else (64, 64))
    assert (seen.q == inputs.q.data_ptr()) == (padded_head or sizes[0] == 64)


def test_strides_that_no_kernel_takes(host: HostKernel) -> None:
    """Columns apart, rows at odd places, one gradient for all, gradients among other things."""
    columns = randn(2, 64, 4, 30).permute(0, 3, 2, 1)
    odd = randn(2, 50, 2, 67, seed=1)[..., :64]
    one = randn(1, 1, 1, 1, seed=3).expand(2, 30, 4, 64)
    inputs = Inputs(columns, odd, randn(2, 50, 2, 64, seed=2), one)
    dq = torch.full((2, 64, 4, 30), math.nan, dtype=DTYPE).permute(0, 3, 2, 1)
    around = torch.full((2, 50, 2, 67), 7.0, dtype=DTYPE)
    call = inputs.call(dq=dq, dk=around[..., :64], dlse=torch.ones(1, 1, 1).expand(2, 4, 30))
    run(call)
    inputs.check(call)
    assert (around[..., 64:] == 7).all()
    for name in ("q", "k", "dout"):
        assert getattr(host.calls[0], name) % 16 == 0
        assert getattr(host.calls[0], f"{name}_strides")[3] == 1


@pytest.mark.parametrize("wanted", [("dq",), ("dk", "dv"), ("dsinks",), ()], ids=str)
def test_only_what_is_wanted_is_asked_for(host: HostKernel, wanted: tuple[str, ...]) -> None:
    inputs = dense(sinks=torch.randn(4))
    call = inputs.call(**{name: None for name in ("dq", "dk", "dv", "dsinks") if name not in wanted})
    run(call)
    inputs.check(call)
    (seen,) = host.calls
    assert [name for name in ("dq", "dk", "dv") if getattr(seen, name)] == [
        n for n in wanted if n != "dsinks"
    ]


def test_sinks_without_end(host: HostKernel) -> None:
    sinks = torch.tensor([-math.inf, math.inf, 0.5, -1.0])
    inputs = dense(sinks=sinks, causal=True)
    call = inputs.call(dlse=torch.randn(2, 4, 30))
    run(call, causal=True)
    assert call.dsinks[0] == 0
    assert call.dsinks[1] == pytest.approx(float(call.dlse[:, 1].sum()), rel=1e-5)  # the LSE is the sink
    finite = replace(call, dsinks=torch.full_like(sinks, math.nan))
    finite.scores.sinks[:2] = torch.tensor([-1e4, 1e4])
    expected = dense(sinks=finite.scores.sinks, causal=True)
    expected.check(replace(finite, dsinks=call.dsinks, dq=call.dq, dk=call.dk, dv=call.dv))


def test_packed_rows(host: HostKernel) -> None:
    inputs = dense(causal=True)
    one = Inputs(*(x[:1] for x in (inputs.q, inputs.k, inputs.v, inputs.dout)), causal=True)
    padding = 3

    def packed(x: Tensor) -> Tensor:
        return torch.cat((x[0], torch.full((padding, *x.shape[2:]), math.nan, dtype=x.dtype)))

    q, k, v, out, dout = map(packed, (one.q, one.k, one.v, one.out, one.dout))
    lse = torch.cat((one.lse[0], torch.full((4, padding), -math.inf)), 1)
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (30, 50)]
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    layout = Packed(*offsets, 30, 50)
    call = BackwardCall(q, k, v, out, lse, dout, None, *grads, None, one.mask, one.scores, layout)
    run(call, causal=True, varlen=True)
    dq, dk, dv = grads
    one.check(one.call(dq=dq[None, :30], dk=dk[None, :50], dv=dv[None, :50]))
    (seen,) = host.calls
    assert (seen.cu_seqlens_q, seen.cu_seqlens_k) == tuple(x.data_ptr() for x in offsets)
    assert (seen.batch, seen.seq_len_q, seen.seq_len_k, seen.total_q, seen.total_k) == (1, 30, 50, 33, 53)


def test_keys_in_use(host: HostKernel) -> None:
    inputs, used = dense(), torch.tensor([50, 20], dtype=torch.int32)
    call = replace(inputs.call(), layout=Cached(used))
    run(call, varlen=True)
    (seen,) = host.calls
    assert (seen.seqused_k, seen.cu_seqlens_k, seen.seq_len_k) == (used.data_ptr(), 0, 50)
    wanted = [name for name, is_wanted in call.problem.features().items() if is_wanted]
    assert wanted == ["varlen"]


def test_no_rows_and_no_keys_launch_nothing(host: HostKernel) -> None:
    sinks = torch.randn(4)
    for sizes in ((0, 50), (30, 0)):
        q, k = randn(2, sizes[0], 4, 64), randn(2, sizes[1], 2, 64)
        inputs = Inputs(q, k, k.clone(), q.clone(), sinks)
        call = inputs.call(dlse=torch.randn(2, 4, sizes[0]))
        run(call)
        assert not any(x.any() for x in (call.dq, call.dk, call.dv))
        torch.testing.assert_close(call.dsinks, call.dlse.sum((0, 2)))
    assert not host.calls


def test_the_problem_asks_for_gradients() -> None:
    call = replace(dense(sinks=torch.zeros(4), causal=True).call(), deterministic=True)
    problem = call.problem
    assert (problem.direction, problem.deterministic, problem.lse) == (BACKWARD, True, False)
    assert "sinks" not in problem.features()
    assert problem.label() == "backward fp16 b2 h4/2 s30x50 d64 causal deterministic"
