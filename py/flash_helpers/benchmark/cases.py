"""Cases of the benchmarks of features and calls: what is computed, its inputs, its independent reference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.expected import gradients
from flash_helpers.content import ContentError
from flash_helpers.flops import attention_flop, visible_pairs
from flash_helpers.kernels.dtype import DType

DTYPE = DType.BF16
D_HEAD = 128
GRADIENTS = "gradients"
"""The feature of dense cases whose calls give the gradients of q, k and v, by way of autograd."""


@dataclass(frozen=True)
class Case:
    """One row of a benchmark; elements are ``DTYPE``.

    Attributes:
        feature: the part of the table that it belongs to.
        batch, seq_q, seq_k, heads, heads_kv: sizes; with ``lengths`` of the longest sequence.
        causal: the mask, aligned bottom-right.
        window: keys to the left that a query sees, and none to the right: such a window is causal.
        lengths: of packed sequences.
        d_head: head size.
    """

    feature: str
    batch: int
    seq_q: int
    seq_k: int
    heads: int = 32
    heads_kv: int = 32
    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()
    d_head: int = D_HEAD

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Keys to the left and right of a query that the window lets it see; None: all."""
        return (self.window, None if self.window is None else 0)

    def label(self) -> str:
        """For tables: ``b2 s8192 h32/8 window 512``."""
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        seq = f"s{self.seq_q}" + (f"x{self.seq_k}" if self.seq_k != self.seq_q else "")
        size = f" d{self.d_head}" if self.d_head != D_HEAD else ""
        mask = f" window {self.window}" if self.window is not None else " causal" if self.causal else ""
        if self.lengths:
            seq = f"{len(self.lengths)} sequences, {sum(self.lengths)} tokens"
        return f"b{self.batch} {seq} {heads}{size}{mask}"

    def to_json(self) -> dict[str, Any]:
        """The problem in the words of result files; what there is none of is left out."""
        sizes = {
            "dtype": DTYPE.name, "batch": self.batch, "n_heads": self.heads, "n_heads_kv": self.heads_kv,
            "seq_len_q": self.seq_q, "seq_len_k": self.seq_k, "d_head": self.d_head, "causal": self.causal,
        }  # fmt: skip
        window = {} if self.window is None else {"window": self.window}
        return sizes | window | ({"lengths": list(self.lengths)} if self.lengths else {})

    @classmethod
    def from_json(cls, feature: str, values: dict[str, Any]) -> Case:
        """The inverse of ``to_json``. Raises one of ``CONTENT_ERRORS`` where the values are no case."""
        if values["dtype"] != DTYPE.name:
            raise ContentError(f"dtype is {values['dtype']!r}")
        return cls(
            feature, values["batch"], values["seq_len_q"], values["seq_len_k"], values["n_heads"],
            values["n_heads_kv"], values["causal"], values.get("window"), tuple(values.get("lengths", ())),
            values["d_head"],
        )  # fmt: skip

    def flop(self) -> int:
        """FLOP of the visible pairs."""
        sizes = [(n, n) for n in self.lengths] or [(self.seq_q, self.seq_k)] * self.batch
        pairs = sum(visible_pairs(q, k, self.causal, self.limits) for q, k in sizes)
        return attention_flop(1, self.heads, self.d_head, pairs)

    def cache_bytes(self) -> int:
        """Bytes of K and V, which a single query reads once."""
        return 2 * self.batch * self.seq_k * self.heads_kv * self.d_head * DTYPE.itemsize


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q, k, v (batch, seq, heads, d) or packed (total, heads, d).

    Attributes:
        ends: (sequences + 1,) int32, where packed sequences begin and the last one ends; None: not packed.
        dout: gradient of the output, of cases that are differentiated; None: of others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ends: Tensor | None
    dout: Tensor | None = None


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Standard normal tensors, the same for equal cases."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = DTYPE.to_torch_dtype()

    def normal(seq: int, heads: int) -> Tensor:
        shape = (sum(case.lengths),) if case.lengths else (case.batch, seq)
        return torch.randn(*shape, heads, case.d_head, device=device, dtype=dtype, generator=generator)

    ends = None
    if case.lengths:
        ends = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    q, k, v = (
        normal(n, h)
        for n, h in ((case.seq_q, case.heads), (case.seq_k, case.heads_kv), (case.seq_k, case.heads_kv))
    )
    return Inputs(q, k, v, ends, normal(case.seq_q, case.heads) if case.feature == GRADIENTS else None)


def expected_output(case: Case, x: Inputs) -> Tensor | tuple[Tensor, ...]:
    """What is right, by ``correctness.reference``: float32, of the shape of q; or the three gradients."""
    if x.dout is not None:
        return gradients(x.q, x.k, x.v, x.dout, case.causal)
    if not case.lengths:
        return reference(x.q, x.k, x.v, case.causal, case.limits)
    sequences = zip(*(t.split(case.lengths) for t in (x.q, x.k, x.v)), strict=True)
    parts = [reference(q[None], k[None], v[None], case.causal, case.limits)[0] for q, k, v in sequences]
    return torch.cat(parts)
