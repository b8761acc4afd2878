"""One call of the backward pass as one value: what autograd asks for, and a backend's ``run`` fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attention.call import Dropout, Mask, Scores, problem_of
from flash_attention.layouts import DENSE, Layout
from flash_helpers.kernels.problem import AttentionProblem


@dataclass(frozen=True)
class BackwardCall:
    """A checked call of the backward pass of one ``flash_attention.call.Call``.

    Attributes:
        q: the queries, with the axes of the layout.
        k: the keys.
        v: the values.
        out: what the forward pass returned; like q, with the values' head size.
        lse: what it returned as the LSE, float32; its axes are those of ``Call.lse``.
        dout: the gradient of out, any strides.
        dlse: the gradient of lse, float32; None: the LSE was not used.
        dq: is written with the gradient of q, like q; float32 where it is to be added to others; None: not
            wanted.
        dk: likewise of k; float32 where it is to be added to others, as dv then is.
        dv: likewise of v.
        dsinks: likewise of the sinks, (n_heads,); None: not wanted, or there are none.
        dcaptured: likewise of tensors that ``score_mod`` captures, by their places in ``scores.traced``.
        mask: which keys a query sees.
        scores: what becomes of a product.
        layout: how rows form sequences; pages have no gradient.
        deterministic: equal calls give equal bits.
        dropout: what the forward pass dropped of the softmax; None: nothing.
        problem: the call as ``select`` sees it; follows from the others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    mask: Mask
    scores: Scores
    layout: Layout = DENSE
    deterministic: bool = False
    dcaptured: Mapping[int, Tensor] = field(default_factory=dict)
    dropout: Dropout | None = None
    problem: AttentionProblem = field(init=False)

    def __post_init__(self) -> None:
        q, k, v, (_, softcap, sinks, traced) = self.q, self.k, self.v, self.scores
        asked = (
            (q.dtype, q.shape, k.shape, v.shape, self.layout.sizes(q, k), type(self.layout)),
            (self.mask, softcap > 0, sinks is None, self.deterministic),
            (None if traced is None else traced.mod, *self.dcaptured),
            (self.dropout is None, *self.float_gradients),
        )
        problem = _problems.get(asked)
        if problem is None:
            dropout = self.dropout is not None
            problem = problem_of(q, k, v, self.mask, self.scores, self.layout, dropout=dropout)
            asked_of = self.deterministic, tuple(sorted(self.dcaptured)), *self.float_gradients
            problem = problem.backward(*asked_of)
            if len(_problems) >= PROBLEMS_KEPT:
                _problems.clear()
            _problems[asked] = problem
        object.__setattr__(self, "problem", problem)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Mask, Scores, Layout]:
        """Inputs, mask, scores and layout."""
        return self.q, self.k, self.v, self.mask, self.scores, self.layout

    @property
    def float_gradients(self) -> tuple[bool, bool]:
        """Whether the gradients of keys and values are float32, and whether that of queries is."""
        return _float32(self.dk) or _float32(self.dv), _float32(self.dq)


def _float32(x: Tensor | None) -> bool:
    return x is not None and x.dtype is torch.float32


PROBLEMS_KEPT = 1024
_problems: dict[Any, AttentionProblem] = {}  # of backward calls, by all that they follow from
