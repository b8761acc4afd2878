"""One call of attention as one value: what the public functions were asked, checked, and a backend runs.

A layout is made of the caller's arguments between v and the options, in their order. It says how the rows of
q, k and v form sequences: ``Dense``, ``Packed`` or ``Cached``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attention.checks import calls as checks
from flash_attention.checks.options import checked_flag, checked_offset, checked_splits, checked_window
from flash_attention.checks.tma import page_obstacle, stride_obstacle
from flash_attention.mods.tracing import Traced
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem, Window, visible_limits

Sizes = tuple[int, int, int]  # batch items, most queries of one, most keys of one


BATCHES = "(batch, seq, heads, d)"
PACKED = "(total, heads, d)"


# ---------------------------------------------------------------------- layouts
class Dense(NamedTuple):
    """Batch items of one length: q, k and v are (batch, seq, heads, d)."""

    @property
    def axes(self) -> str:
        """The axes of q, for messages."""
        return BATCHES

    @property
    def paged(self) -> bool:
        """Whether the first axis of k and v counts pages."""
        return False

    @property
    def axes_kv(self) -> str:
        """The axes of k and v, for messages."""
        return self.axes

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return q.shape[0], q.shape[1], k.shape[1]

    def check_numbers(self) -> None:
        """Refuses what is wrong with the arguments that are no tensors."""

    def check(self, q: Tensor, k: Tensor) -> None:
        """Refuses what is wrong with the layout, as far as no number of a tensor is read."""

    def check_values(self, q: Tensor, k: Tensor) -> None:
        """Reads the tensors of the layout where the caller wants it, or where nobody waits for that."""

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors of the layout by the names of the arguments."""
        return {}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Dense:
        """The same with other tensors, in the order of ``tensors``."""
        return self

    def slots(self) -> tuple[Any, ...]:
        """What a remembered call compares, in the order of ``launch_cache.repeat``."""
        return ()


class Packed(NamedTuple):
    """Sequences one behind the other: q, k and v are (total, heads, d). See ``attention_varlen``."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    validate: bool = False

    @property
    def axes(self) -> str:
        return PACKED

    @property
    def axes_kv(self) -> str:
        return PACKED

    @property
    def paged(self) -> bool:
        return False

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return self.cu_seqlens_q.numel() - 1, self.max_seqlen_q, self.max_seqlen_k

    def check_numbers(self) -> None:
        checks.check_max_seqlen("max_seqlen_q", self.max_seqlen_q)
        checks.check_max_seqlen("max_seqlen_k", self.max_seqlen_k)
        checked_flag("validate", self.validate)

    def check(self, q: Tensor, k: Tensor) -> None:
        checks.check_packing(q, k, *self[:4])

    def check_values(self, q: Tensor, k: Tensor) -> None:
        if checked_flag("validate", self.validate) or not q.is_cuda:
            for name, offsets, x, longest in (
                ("q", self.cu_seqlens_q, q, self.max_seqlen_q),
                ("k", self.cu_seqlens_k, k, self.max_seqlen_k),
            ):
                names = f"cu_seqlens_{name}", f"max_seqlen_{name}"
                checks.check_offset_values(names[0], offsets, x.shape[0], names[1], longest)

    def tensors(self) -> dict[str, Tensor | None]:
        return {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Packed:
        cu_seqlens_q, cu_seqlens_k = tensors
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        return self._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)

    def slots(self) -> tuple[Any, ...]:
        return self.cu_seqlens_q, self.cu_seqlens_k, None, None, None, self.max_seqlen_q, self.max_seqlen_k


class Cached(NamedTuple):
    """Batch items with as many keys as a tensor says, in one piece or in pages. See ``attention_cached``."""

    seqused_k: Tensor
    block_table: Tensor | None = None
    validate: bool = False

    @property
    def axes(self) -> str:
        return BATCHES

    @property
    def axes_kv(self) -> str:
        return BATCHES

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        capacity = k.shape[1]
        if self.block_table is not None:
            capacity *= self.block_table.shape[1] if k.shape[0] else 0
        return q.shape[0], q.shape[1], capacity

    def check_numbers(self) -> None:
        checked_flag("validate", self.validate)

    def check(self, q: Tensor, k: Tensor) -> None:
        checks.check_seqused("seqused_k", self.seqused_k, q)
        if self.block_table is not None:
            checks.check_block_table(self.block_table, q)

    def check_values(self, q: Tensor, k: Tensor) -> None:
        if checked_flag("validate", self.validate) or not q.is_cuda:
            checks.check_counts("seqused_k", self.seqused_k)
            if self.block_table is not None:
                checks.check_pages(self.block_table, self.seqused_k, k)

    def tensors(self) -> dict[str, Tensor | None]:
        return {"seqused_k": self.seqused_k, "block_table": self.block_table}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Cached:
        seqused_k, block_table = tensors
        assert seqused_k is not None
        return self._replace(seqused_k=seqused_k, block_table=block_table)

    def slots(self) -> tuple[Any, ...]:
        return None, None, self.seqused_k, self.block_table, None


class PackedCached(NamedTuple):
    """Packed queries of which, or of whose keys, a tensor says how many count. See ``attention_varlen``.

    Keys are packed (``cu_seqlens_k``), a cache of one piece a sequence, or pages.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    n_splits: int | None = None
    validate: bool = False

    @property
    def axes(self) -> str:
        return PACKED

    @property
    def axes_kv(self) -> str:
        return BATCHES if self.cu_seqlens_k is None else PACKED

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return self.cu_seqlens_q.numel() - 1, self.max_seqlen_q, min(self.max_seqlen_k, self.capacity(k))

    def capacity(self, k: Tensor) -> int:
        """Keys of a sequence for which there is room."""
        if self.cu_seqlens_k is not None:
            return self.max_seqlen_k
        if self.block_table is None:
            return k.shape[1]
        return k.shape[1] * self.block_table.shape[1] if k.shape[0] else 0

    def check_numbers(self) -> None:
        checks.check_max_seqlen("max_seqlen_q", self.max_seqlen_q)
        checks.check_max_seqlen("max_seqlen_k", self.max_seqlen_k)
        checked_splits(self.n_splits)
        checked_flag("validate", self.validate)

    def check(self, q: Tensor, k: Tensor) -> None:
        checks.check_packed_cache(q, k, *self[:7])
        checked_splits(self.n_splits)

    def check_values(self, q: Tensor, k: Tensor) -> None:
        if checked_flag("validate", self.validate) or not q.is_cuda:
            checks.check_packed_cache_values(q, k, *self[:7])

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in self._fields[:5]}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> PackedCached:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table = tensors
        assert cu_seqlens_q is not None
        return self._replace(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            block_table=block_table,
        )

    def slots(self) -> tuple[Any, ...]:
        tensors = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, self.block_table, self.seqused_q
        return (*tensors, self.max_seqlen_q, self.max_seqlen_k)


Layout = Dense | Packed | Cached | PackedCached
DENSE = Dense()
# The function and the operator that take each.
NAMES: dict[type[Layout], str] = {
    Dense: "attention",
    Packed: "attention_varlen",
    Cached: "attention_cached",
    PackedCached: "attention_packed_cached",
}


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
        dtype=checks.DTYPES[q.dtype],
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
