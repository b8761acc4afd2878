"""Who computes a case: this library as a user calls it, PyTorch, and packages with features of their own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_helpers.benchmark.cases import Case, Inputs
from flash_helpers.benchmark.implementations import Prepared, UnavailableError, last_kernel_name
from flash_helpers.benchmark.peers import FA3, FA4, PackagePeer, is_installed
from flash_helpers.benchmark.result_file import BOTH
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.problem import FORWARD

Call = Callable[[], Any]
OURS = "ours"
SINKS = "learnable_sink"  # FlashAttention-4's argument


@dataclass(frozen=True)
class Contestant:
    """Somebody who is timed.

    Attributes:
        name: in rows.
        bind: makes the call; UnavailableError: it has no such feature, or is not there.
        context: settings around the calls.
        ran: after a call: the kernel that it chose, of those that say so.
        gradients_by: the kernel that it chooses for gradients alone, of those that say so.
    """

    name: str
    bind: Callable[[Case, Inputs], Call]
    context: Callable[[], Any] = nullcontext
    ran: Callable[[], str] = str
    gradients_by: Callable[[Case, Inputs], str] = lambda case, x: ""

    def prepare(self, case: Case, x: Inputs) -> Prepared:
        """The call of the case's pass with what belongs to it. Raises what ``bind`` raises."""
        if case.direction != FORWARD:
            return differentiated(self, case, x)
        return Prepared(self.bind(case, x), self.context, self.ran)


def named_kernel(config: KernelConfig) -> Contestant:
    """The library with a configuration that is named."""

    def bind(case: Case, x: Inputs) -> Call:
        from flash_helpers.select.candidates import unable_reason

        uneven = case.causal or case.window is not None or bool(case.lengths)
        fields = {"dtype": case.dtype, "dynamic_schedule": uneven}
        wanted = replace(config, **{n: v for n, v in fields.items() if hasattr(config, n)})
        if reason := unable_reason(wanted, case.problem(), [wanted]):
            raise UnavailableError(reason)
        return own_call(case, x, config=wanted)

    return Contestant(config.short_form(), bind, ran=last_kernel_name)


def own_call(case: Case, x: Inputs, **options: Any) -> Call:
    """The library's, as a user writes it."""
    from flash_attention import attention, attention_varlen

    options |= {"causal": case.causal}
    if case.window is not None:
        options["window"] = case.limits
    if case.softcap:
        options["softcap"] = case.softcap
    if x.sinks is not None:
        options["sinks"] = x.sinks
    if x.ends is not None:
        ends, longest = x.ends, case.seq_q
        return lambda: attention_varlen(x.q, x.k, x.v, ends, ends, longest, longest, **options)
    return lambda: attention(x.q, x.k, x.v, **options)


def sdpa_call(case: Case, x: Inputs) -> Call:
    """PyTorch's, whose mask for a single query is none at all.

    Raises:
        UnavailableError: it has no such feature without a mask in memory.
    """
    if x.ends is not None or case.window is not None:
        raise UnavailableError("no packed sequences, no windows")
    if case.softcap or x.sinks is not None:
        raise UnavailableError("no soft caps, no sinks")
    if case.causal and case.seq_q != case.seq_k:
        raise UnavailableError("is_causal aligns the mask top-left where lengths differ")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.heads != case.heads_kv}
    return lambda: scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def cudnn_call(case: Case, x: Inputs) -> Call:
    """PyTorch's call of cuDNN.

    Raises:
        UnavailableError: there is no GPU, or it has no such feature.
    """
    if not x.q.is_cuda:
        raise UnavailableError("runs on cuda only")
    return sdpa_call(case, x)


def fa2_call(case: Case, x: Inputs) -> Call:
    """PyTorch's FlashAttention-2, on a GPU as the operator that knows windows and packed sequences too.

    Raises:
        UnavailableError: it has no such feature.
    """
    if not x.q.is_cuda:
        return sdpa_call(case, x)
    if case.softcap or x.sinks is not None:
        raise UnavailableError("no soft caps, no sinks")
    if case.value_size != case.d_head:
        raise UnavailableError("one head size for Q, K and V only")
    left, right = (-1 if limit is None else limit for limit in case.limits)
    options: dict[str, Any] = {} if case.window is None else {"window_size_left": left}
    if case.window is not None:
        options["window_size_right"] = right
    sizes = (x.ends, x.ends, case.seq_q, case.seq_k)
    operator = torch.ops.aten._flash_attention_forward
    return lambda: operator(x.q, x.k, x.v, *sizes, 0.0, case.causal, False, **options)[0]


def package_call(peer: PackagePeer, case: Case, x: Inputs) -> Call:
    """FlashAttention-3 or -4 from an installed package.

    Raises:
        UnavailableError: not installed, or it has no such feature.
    """
    if not is_installed(peer.module):
        raise UnavailableError(f"{peer.module} is not installed (pip install {peer.package})")
    module = importlib.import_module(peer.module)
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        # Its right limit of None or -1 means no limit; causal has one.
        options["window_size"] = case.limits
    if case.softcap:
        options["softcap"] = case.softcap
    function = module.flash_attn_func
    if x.ends is not None:
        options |= {"cu_seqlens_q": x.ends, "cu_seqlens_k": x.ends}
        options |= {"max_seqlen_q": case.seq_q, "max_seqlen_k": case.seq_q}
        function = module.flash_attn_varlen_func
    if x.sinks is not None:
        if SINKS not in inspect.signature(function).parameters:
            raise UnavailableError("no sinks")
        options[SINKS] = x.sinks

    def call() -> Any:
        result = function(x.q, x.k, x.v, **options)
        return result[0] if isinstance(result, tuple) else result

    return call


def fa3_call(case: Case, x: Inputs) -> Call:
    """FlashAttention-3, whose package has one element type."""
    if case.direction != FORWARD:
        raise UnavailableError(
            "its package has no backward pass (benchmarks/fa3_backward.py times another's, at head size 256)"
        )
    if case.dtype not in FA3.dtypes:
        taken = ", ".join(dtype.name for dtype in FA3.dtypes)
        raise UnavailableError(f"its package takes {taken} only (compare {case.dtype.name} with the others)")
    return package_call(FA3, case, x)


def differentiated(contestant: Contestant, case: Case, x: Inputs) -> Prepared:
    """The gradients of a contestant's call: of one forward pass every time, or of a new one each time."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    call, dout = contestant.bind(case, replace(x, q=leaves[0], k=leaves[1], v=leaves[2])), x.dout

    def context() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(contestant.context())
        return stack

    if case.direction == BOTH:
        return Prepared(lambda: torch.autograd.grad(call(), leaves, dout), context, contestant.ran)
    with context():
        out = call()
    name = contestant.gradients_by(case, x)
    return Prepared(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), context, lambda: name)


def own_gradients_by(case: Case, x: Inputs, deterministic: bool = False) -> str:
    """Short form of the kernel that the library chooses for the gradients of a case."""
    from flash_attention.run.choices import choose

    return choose(case.problem().backward(deterministic), x.q.device, None).kernel.short_form()


CONTESTANTS = (
    Contestant(OURS, own_call, ran=last_kernel_name, gradients_by=own_gradients_by),
    Contestant("fa2", fa2_call, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    Contestant("cudnn", cudnn_call, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    Contestant("fa3", fa3_call),
    Contestant("fa4", lambda case, x: package_call(FA4, case, x)),
)
REPEATABLE = Contestant(
    "attention, repeatable",
    partial(own_call, deterministic=True),
    ran=last_kernel_name,
    gradients_by=partial(own_gradients_by, deterministic=True),
)
"""The library with equal bits in equal calls, which only gradients have to ask for."""
ALL_CONTESTANTS = ",".join(contestant.name for contestant in CONTESTANTS)


def select_contestants(text: str) -> list[Contestant]:
    """Reads names joined by commas.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    names = [name.strip() for name in text.split(",")]
    known = [contestant.name for contestant in CONTESTANTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown contestant {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return [contestant for contestant in CONTESTANTS if contestant.name in names]
