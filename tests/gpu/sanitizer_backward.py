"""Backward kernels for ``sanitizer.py``: which, and one call of each. The forward pass runs on the CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attention import attention
from flash_attention.backward_call import BackwardCall
from flash_attention.call import Mask, Scores
from flash_attention.layouts import DENSE, Layout, Packed
from flash_helpers.kernel_configs import BackwardKernel, BackwardTraits, DType
from flash_helpers.kernels.ampere.backward.config import DQSum, FlashBackwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.kernels.traits import PLAIN_BACKWARD
from flash_helpers.test.gradients import NAMES, check_gradients, run_gradients

KINDS = ("causal", "window", "softcap", "varlen causal", "causal padded_head", "varlen window padded_head")
WINDOW = (40, 7)
SOFTCAP = 20.0
MANY_HEADS = 140  # of keys, of plain kernels: persistent blocks get several items


def configs_of(direction: Direction) -> list[KernelConfig]:
    """What is built of a direction in BF16, and of the Ampere family one that makes dQ by itself."""
    configs = [k.config for k in direction.built() if k.config.dtype is DType.BF16]
    ampere = [config for config in configs if isinstance(config, FlashBackwardKernelConfig)]
    own = {"dq_sum": DQSum.OWN_KERNEL, "dq_B_r": 64, "dq_B_c": 64, "dq_n_warps": 4}
    return list(dict.fromkeys([*configs, *(replace(config, **own) for config in ampere[:1])]))


def kernels(facts: DeviceFacts) -> list[BackwardKernel]:
    """Every configuration that the GPU runs, plain and with one kind of traits after another."""
    found = []
    for direction in directions(BACKWARD):
        configs = configs_of(direction)
        for config, kind in zip(configs, itertools.cycle(KINDS), strict=False):
            for names in dict.fromkeys(("", kind)):
                kernel = BackwardKernel(config, BackwardTraits(**dict.fromkeys(names.split(), True)))
                if not (kernel.malformed_reason() or kernel.infeasible_reason(facts)):
                    found.append(kernel)
    return found


class Sequences:
    """Lengths of queries and keys, and what a kernel's traits make of them."""

    def __init__(self, kernel: BackwardKernel) -> None:
        self.traits = kernel.traits
        # One query block and several, and under a causal mask keys that nobody sees.
        self.q, self.k = ((70, 1, 133), (130, 65, 40)) if self.traits.varlen else ((150,), (300,))
        self.heads, self.heads_kv = 2, 1
        if kernel.traits == PLAIN_BACKWARD:
            self.q, self.k = (70,), (130,)
            self.heads = self.heads_kv = MANY_HEADS
        cut = 24 if self.traits.padded_head else 0
        self.d, self.d_v = kernel.config.d_head - cut, kernel.config.d_head_v - cut

    def options(self) -> dict[str, Any]:
        """Keywords of ``attention``."""
        options: dict[str, Any] = {"causal": self.traits.causal}
        if self.traits.window:
            options["window"] = WINDOW
        if self.traits.softcap:
            options["softcap"] = SOFTCAP
        return options


def run(kernel: BackwardKernel) -> None:
    """Computes the gradients once and compares them with float64, on the CPU."""
    of = Sequences(kernel)
    generator = torch.Generator().manual_seed(0)

    def rows(n: int, heads: int, d: int) -> Tensor:
        return torch.randn(1, n, heads, d, generator=generator).bfloat16()

    parts = []  # of each sequence: q, k, v, dout, out, lse, dlse
    for n, m in zip(of.q, of.k, strict=True):
        q, k, v = rows(n, of.heads, of.d), rows(m, of.heads_kv, of.d), rows(m, of.heads_kv, of.d_v)
        out, lse = attention(q, k, v, return_lse=True, **of.options())
        dlse = torch.randn(lse.shape, generator=generator)
        parts.append((q, k, v, rows(n, of.heads, of.d_v), out, lse, dlse))
    q, k, v, dout, out = (torch.cat(x, 1) for x in list(zip(*parts, strict=True))[:5])
    lse, dlse = (torch.cat([part[i] for part in parts], 2) for i in (5, 6))
    packed = of.traits.varlen
    layout: Layout = DENSE
    if packed:
        ends = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32).cuda() for n in (of.q, of.k)]
        layout = Packed(*ends, max(of.q), max(of.k))
    inputs = (q, k, v, dout, out, lse, dlse)
    q, k, v, dout, out, lse, dlse = ((x[0] if packed else x).contiguous().cuda() for x in inputs)
    mask = Mask.of(of.traits.causal, WINDOW if of.traits.window else (None, None))
    scores = Scores(of.d**-0.5, SOFTCAP if of.traits.softcap else 0.0)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    call = BackwardCall(q, k, v, out, lse, dout, dlse, *grads, None, mask, scores, layout)
    found = {name: x.cpu() for name, x in run_gradients(call, kernel.config).items()}
    begin_q = begin_k = 0
    for part in parts:
        end_q, end_k = begin_q + part[0].shape[1], begin_k + part[1].shape[1]
        mine = {}
        for name in NAMES[:3]:
            at = slice(begin_q, end_q) if name == "dq" else slice(begin_k, end_k)
            mine[name] = found[name][None, at] if packed else found[name]
        check_gradients(mine, *part[:4], part[6], out=part[4], **of.options())
        begin_q, begin_k = end_q, end_k
