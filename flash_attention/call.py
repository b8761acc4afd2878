"""One call of attention as one value: what the public functions were asked, checked, and a backend runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.checks.calls import DTYPES
from flash_attention.checks.options import checked_flag, checked_offset, checked_window
from flash_attention.checks.tma import stride_obstacle
from flash_attention.layouts import DENSE, Cached, Dense, Layout, PackedCached
from flash_attention.mods.tracing import Traced
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.pages import page_obstacle
from flash_helpers.kernels.problem import AttentionProblem, Window, visible_limits


# ---------------------------------------------------------------------- masks and scores
class Mask(NamedTuple):
    """Which keys a query sees, counted from its own place p: the keys ``p - left <= j <= p + right``.

    The last query's own place is the last key. Limits have either sign: with a right limit of -2 the query
    sees what lies at least two keys before its place.

    Attributes:
        left: where they begin, so many keys before p; None: with the first key.
        right: where they end, so many keys after p; None: with the last key. Causal is 0.
    """

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, causal: bool, window: Window) -> Mask:
        """The mask of two options of ``attention``."""
        left, right = window
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right)

    def limits(self, seq_len_q: int, seq_len_k: int) -> Window:
        """(left, right) for these lengths; a limit that hides nothing is None."""
        return visible_limits(False, self, seq_len_q, seq_len_k)


def shifted(causal: bool, window: Window, diagonal_offset: int) -> tuple[bool, Window]:
    """``causal`` and ``window`` that say with an offset of 0 what these say with this one.

    An offset moves every query's own place, which is the same as moving both limits the other way: nothing
    that is called later knows of offsets.

    Raises:
        TypeError: an option of another type than is promised.
    """
    offset, window = checked_offset(diagonal_offset), checked_window(window)
    left, right = Mask.of(checked_flag("causal", causal), window)
    return False, (None if left is None else left - offset, None if right is None else right + offset)


class Scores(NamedTuple):
    """How a product of a query and a key becomes a logit.

    Attributes:
        scale: its factor, any finite number.
        softcap: logits become ``softcap * tanh(logit / softcap)``; 0: they stay.
        sinks: (n_heads,) one more logit a head, which has no value; None: there is none.
        traced: what ``score_mod`` and ``mask_mod`` do to logits, behind the soft cap; None: there are none.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    traced: Traced | None = None


class Dropout(NamedTuple):
    """Weights that are dropped behind the softmax; its sums and the LSE know nothing of it.

    Attributes:
        p: the probability of each; what stays is divided by 1 - p.
        seed: (), int64, on the device of q: with the place of a weight it decides.
    """

    p: float
    seed: Tensor


EVERYTHING, PLAIN = Mask(), Scores(1.0)


# ---------------------------------------------------------------------- the call
@dataclass(frozen=True)
class Call:
    """A checked call of attention: ``backend.run(call, choice)`` needs nothing else.

    Attributes:
        q: the queries, with the axes of the layout.
        k: the keys.
        v: the values.
        out: is written; the queries' axes, the values' head size.
        lse: is written with the natural logarithm of the softmax denominators, float32: (batch, n_heads,
            seq_len_q), of packed sequences (n_heads, total_q); None: not wanted.
        mask: which keys a query sees.
        scores: what becomes of a product.
        layout: how rows form sequences.
        n_sms: SMs that it may use; None: all.
        dropout: what is dropped of the softmax; None: nothing.
        invariant: a query's results have the same bits in every call.
        problem: the call as ``select`` sees it; follows from the others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    mask: Mask
    scores: Scores
    layout: Layout = DENSE
    n_sms: int | None = None
    dropout: Dropout | None = None
    invariant: bool = False
    problem: AttentionProblem = field(init=False)

    def __post_init__(self) -> None:
        problem = problem_of(
            self.q,
            self.k,
            self.v,
            self.mask,
            self.scores,
            self.layout,
            lse=self.lse is not None,
            out_float32=self.out.dtype is torch.float32,
            n_sms=self.n_sms,
            dropout=self.dropout is not None,
            invariant=self.invariant,
        )
        object.__setattr__(self, "problem", problem)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Mask, Scores, Layout]:
        """Inputs, mask, scores and layout."""
        return self.q, self.k, self.v, self.mask, self.scores, self.layout


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = EVERYTHING,
    scores: Scores = PLAIN,
    layout: Layout = DENSE,
    *,
    lse: bool = False,
    out_float32: bool = False,
    n_sms: int | None = None,
    dropout: bool = False,
    invariant: bool = False,
) -> AttentionProblem:
    """What a call with these parts computes, without its tensors; see ``Call``."""
    batch, seq_len_q, seq_len_k = layout.sizes(q, k)
    left, right = mask.limits(seq_len_q, seq_len_k)
    planned = isinstance(layout, PackedCached)
    obstacle = stride_obstacle(q=q, k=k, v=v)
    *_, n_heads, d_head = q.shape
    *_, n_heads_kv, d_head_v = v.shape
    return AttentionProblem(
        dtype=DTYPES[q.dtype],
        batch=batch,
        seq_len_q=seq_len_q,
        seq_len_k=seq_len_k,
        n_heads=n_heads,
        n_heads_kv=n_heads_kv,
        d_head=d_head,
        d_head_v=d_head_v,
        left=left,
        right=right,
        softcap=scores.softcap > 0,
        sinks=scores.sinks is not None,
        varlen=not isinstance(layout, Dense),
        cached=isinstance(layout, Cached) or planned,
        paged=layout.paged,
        planned=planned,
        lse=lse,
        tma_obstacle=obstacle or (page_obstacle(k.shape[1]) if layout.paged else None),
        out_float32=out_float32,
        n_sms=n_sms,
        mod=None if scores.traced is None else scores.traced.mod,
        dropout=dropout,
        invariant=invariant,
    )


class Ran(NamedTuple):
    """What ``backend.run`` has run.

    Attributes:
        kernel: the kernel, or the steps of its configuration; None: there was nothing to compute.
        launched: its launch (``backends.cuda.Launched``), to be made again; None: on the CPU.
        workspace: float32 memory for the parts of split keys, or None.
        kept: what else the launch reads, and the library keeps; or None.
        repeatable: whether the launch reads nothing but tensors of the call and what is kept.
    """

    kernel: Kernel | None
    launched: Any = None
    workspace: Tensor | None = None
    kept: Tensor | None = None
    repeatable: bool = True
