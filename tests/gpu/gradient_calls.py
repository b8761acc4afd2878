"""One backward call: tensors within NaN, gradients within a sentinel, and what should come out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import unwritten
from torch import Tensor
from trait_calls import GUARD, PADDING, SENTINEL, Sequences, guarded

from flash_attention import attention, attention_varlen
from flash_attention.backward_call import BackwardCall
from flash_attention.cached import attention_cached
from flash_attention.call import Mask, Scores
from flash_attention.layouts import DENSE, Cached, Layout, Packed
from flash_helpers.kernel_configs import DType
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.test.gradients import check_gradients

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """What to differentiate.

    Attributes:
        q, k: queries and keys of every sequence; a tuple: of each, one sequence packed behind the other.
        batch: sequences, where no tuple says it.
        heads: query heads and kv heads.
        d: head sizes of q and k, of v and out; 0: the kernel's.
        used: keys of each sequence that exist; the others are NaN.
        sinks: there are some, one of them -inf and one +inf.
        dlse: the loss uses the LSE.
        options: further keywords of ``attention``.
    """

    q: int | tuple[int, ...] = 200
    k: int | tuple[int, ...] = 200
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    d: tuple[int, int] = (0, 0)
    used: tuple[int, ...] | None = None
    sinks: bool = False
    dlse: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def sizes(self, d_head: int, d_head_v: int) -> tuple[int, int]:
        """Head sizes for a kernel with these."""
        return self.d[0] or d_head, self.d[1] or d_head_v


class Call:
    """The tensors of a case, and its forward pass."""

    def __init__(self, case: Case, dtype: DType, d: tuple[int, int], seed: int = 1) -> None:
        self.case, self.d = case, d
        self.generator = torch.Generator(device="cuda").manual_seed(seed)
        self.dtype = dtype.to_torch_dtype()
        heads, heads_kv = case.heads
        self.of_q, self.of_k = Sequences(case.q, case.batch), Sequences(case.k, case.batch)
        self.q, self.dout = (self.tensor(self.of_q, heads, size) for size in d)
        self.k, self.v = (self.tensor(self.of_k, heads_kv, size) for size in d)
        self.sinks = None
        if case.sinks:
            self.sinks = torch.randn(heads, generator=self.generator, device="cuda")
            self.sinks[0] = -math.inf
            self.sinks[-1] = math.inf
        self.layout, inputs = self.packing()
        left, right = case.options.get("window", (None, None))
        right = 0 if case.options.get("causal") else right
        scale = case.options.get("softmax_scale", d[0] ** -0.5)
        self.mask = Mask(left, right)
        self.scores = Scores(scale, case.options.get("softcap", 0.0), self.sinks)
        unwritten.fill_with_nan()
        with torch.no_grad():
            self.out, self.lse = self.attend(*inputs)
        self.dlse = None
        if case.dlse:
            self.dlse = torch.randn(self.lse.shape, generator=self.generator, device="cuda")
            if self.of_q.packed:
                self.dlse[:, -PADDING:] = math.nan

    def tensor(self, sequences: Sequences, heads: int, columns: int) -> Tensor:
        """Random rows within NaN; what is packed has padding of NaN behind its last row."""
        _, x = guarded((*sequences.shape, heads, columns), self.dtype, math.nan)
        x.copy_(torch.randn(x.shape, generator=self.generator, device="cuda"))
        if sequences.packed:
            x[:, -PADDING:] = math.nan
        return x

    def packing(self) -> tuple[Layout, tuple[Tensor, Tensor, Tensor]]:
        """The layout, and q, k and v with its axes."""
        if self.case.used is not None:
            used = torch.tensor(self.case.used, dtype=torch.int32, device="cuda")
            for b, n in enumerate(self.case.used):
                self.k[b, n:], self.v[b, n:] = math.nan, math.nan
            return Cached(used), (self.q, self.k, self.v)
        if not self.of_q.packed:
            return DENSE, (self.q, self.k, self.v)
        offsets = [torch.tensor(s.offsets, dtype=torch.int32).cuda() for s in (self.of_q, self.of_k)]
        layout = Packed(*offsets, self.of_q.longest, self.of_k.longest)
        return layout, (self.q[0], self.k[0], self.v[0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """Output and LSE."""
        options: dict[str, Any] = {**self.case.options, "sinks": self.sinks, "return_lse": True}
        if isinstance(self.layout, Packed):
            return attention_varlen(q, k, v, *self.layout[:4], **options)
        if isinstance(self.layout, Cached):
            return attention_cached(q, k, v, self.layout.seqused_k, **options)
        return attention(q, k, v, **options)

    def backward(
        self,
        wanted: tuple[str, ...] = (*GRADIENTS, "dsinks"),
        deterministic: bool = False,
        floats: tuple[str, ...] = (),
    ) -> BackwardCall:
        """The backward call. Rows of ``out`` and ``dout`` that are of no sequence hold NaN.

        Args:
            floats: gradients that are float32.
        """
        unpacked = (lambda x: x[0]) if self.of_q.packed else (lambda x: x)
        out = self.out.clone()
        if self.of_q.packed:
            out[-PADDING:] = math.nan
        self.buffers, grads = {}, {}
        for name, like in zip(GRADIENTS, (self.q, self.k, self.v), strict=True):
            dtype = torch.float32 if name in floats else self.dtype
            self.buffers[name], grad = guarded(tuple(like.shape), dtype, SENTINEL)
            grads[name] = unpacked(grad.fill_(math.nan)) if name in wanted else None
        dsinks = None
        if self.sinks is not None and "dsinks" in wanted:
            dsinks = torch.full_like(self.sinks, math.nan)
        unwritten.fill_with_nan()
        return BackwardCall(
            unpacked(self.q), unpacked(self.k), unpacked(self.v), out, self.lse, unpacked(self.dout),
            self.dlse, grads["dq"], grads["dk"], grads["dv"], dsinks, self.mask, self.scores, self.layout,
            deterministic,
        )  # fmt: skip

    def check(self, found: dict[str, Tensor]) -> None:
        """Each sequence against float64; zeros where no sequence is; nothing written around a gradient."""
        dense = {name: x[None] if self.of_q.packed and x.ndim == 3 else x for name, x in found.items()}
        dsinks = None if self.sinks is None else torch.zeros(len(self.sinks), dtype=torch.float64).cuda()
        sequences = [slice(0, self.case.batch)]  # those of one length at once
        if self.of_q.packed or self.case.used is not None:
            sequences = [slice(b, b + 1) for b in range(len(self.of_q.lengths))]
        for some in sequences:
            dsinks_of_one = self._check_sequences(dense, some)
            if dsinks is not None and dsinks_of_one is not None:
                dsinks += dsinks_of_one
        for name in GRADIENTS:
            if name in dense and (self.of_q if name == "dq" else self.of_k).packed:
                assert not dense[name][:, -PADDING:].any(), f"{name} of rows of no sequence"
            if name in self.buffers:
                self._check_guard(name, dense.get(name))
        if "dsinks" in found and dsinks is not None:
            finite = self.sinks.isfinite()
            torch.testing.assert_close(found["dsinks"].double()[finite], dsinks[finite], atol=2e-2, rtol=2e-2)
            assert found["dsinks"][0] == 0, "a sink of -inf has no gradient"

    def _check_sequences(self, found: dict[str, Tensor], some: slice) -> Tensor | None:
        """Sequences of one length; returns what they give to dsinks."""
        b, keys = some.start, self.of_k.lengths[some.start]
        if self.case.used is not None:
            keys = self.case.used[b]

        def rows(x: Tensor, of: Sequences, n: int) -> Tensor:
            return (of.rows(x, b) if of.packed else x[some])[:, :n]

        queries = self.of_q.lengths[b]
        q, dout = (rows(x, self.of_q, queries) for x in (self.q, self.dout))
        k, v = (rows(x, self.of_k, keys) for x in (self.k, self.v))
        dlse = None
        if self.dlse is not None:
            dlse = self.of_q.lse(self.dlse, b) if self.of_q.packed else self.dlse[some]
        mine = {
            name: rows(x, self.of_q if name == "dq" else self.of_k, queries if name == "dq" else keys)
            for name, x in found.items()
            if name in GRADIENTS
        }
        out = rows(self.out[None] if self.of_q.packed else self.out, self.of_q, queries)
        check_gradients(mine, q, k, v, dout, dlse, out=out, sinks=self._finite_sinks(), **self.case.options)
        if self.case.used is not None:
            for name in ("dk", "dv"):
                assert name not in found or not found[name][some, keys:].any(), f"{name} of unused keys"
        if self.sinks is None:
            return None
        from flash_helpers.test.reference import reference_gradients

        return reference_gradients(
            q, k, v, dout, dlse, sinks=self._finite_sinks(), **self.case.options
        ).dsinks

    def _finite_sinks(self) -> Tensor | None:
        """Sinks that float64 differentiates: ±inf as what has the same effect."""
        if self.sinks is None:
            return None
        return self.sinks.double().clamp(-1e4, 1e4)

    def _check_guard(self, name: str, gradient: Tensor | None) -> None:
        buffer = self.buffers[name].clone()
        inside = buffer[1:-1, GUARD:-GUARD, :, GUARD:-GUARD]
        if gradient is not None:
            assert not inside.isnan().any(), f"{name} has elements that were not written, or NaN"
        inside.fill_(SENTINEL)
        assert (buffer == SENTINEL).all(), f"something was written around {name}"


def problem_of_case(case: Case, dtype: DType, d: tuple[int, int]) -> AttentionProblem:
    """What the case's backward call asks for, without tensors: for kernels that are built ahead."""
    of_q, of_k = Sequences(case.q, case.batch), Sequences(case.k, case.batch)
    left, right = case.options.get("window", (None, None))
    mask = Mask(left, 0 if case.options.get("causal") else right)
    left, right = mask.limits(of_q.longest, of_k.longest)
    return AttentionProblem(
        dtype, len(of_q.lengths), of_q.longest, of_k.longest, *case.heads, *d, left, right,
        softcap=bool(case.options.get("softcap")), sinks=case.sinks,
        varlen=of_q.packed or case.used is not None, cached=case.used is not None,
    ).backward()  # fmt: skip
