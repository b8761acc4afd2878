"""What a launch is told beside tensors and scale: one list, from which the binding's reader is generated.

Each field is a member of ``flash::ForwardProblem`` of the same name, whose C++ type says how it is read.
"""

from __future__ import annotations

from typing import NamedTuple

UNBOUNDED = 2**30 - 1  # a side of the window that has no bound


class Features(NamedTuple):
    """The run-time part of what plain attention does not need; see ``flash::ForwardProblem``.

    Attributes:
        d_head_v: head size of v and o.
        window_left, window_right: limits of the keys that a query sees, of either sign; ``UNBOUNDED``: none.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: address of (n_heads,) float32 logits, or 0.
        cu_seqlens_q, cu_seqlens_k: addresses of (batch + 1,) int32 offsets, or 0.
        seqused_k: address of (batch,) int32 key counts, or 0.
        total_q: with cu_seqlens_q: rows of q in all; lse is (n_heads, total_q).
        total_k: with cu_seqlens_k: rows of k in all.
        n_splits: parts that the keys are cut into.
        partial_o: address of (n_splits, batch, n_heads, seq_len_q, d_head_v) float32, or 0.
        partial_lse: address of (n_splits, batch, n_heads, seq_len_q) float32, or 0.
        block_table: address of (batch, max_pages) int32 page numbers, or 0. With it k and v are
            (n_pages, page_size, n_heads_kv, d_head).
        max_pages, page_size: see block_table.
        o_float32: o is float32; of kernels that split keys.
        kept_sums: address of what ``config.kept_sums`` says, float32, or 0.
        seqused_q: address of (batch,) int32 query counts, or 0. This and the next are of planned kernels.
        plan_slots: thread blocks that run at a time; 0: keys are not cut.
        plan_shortest: tiles of keys of a part, at least.
        plan_longest: tiles of a part of a sequence with few queries, at most.
        plan_few_queries: these are so many.
        plan_fixed: parts that the keys of every sequence are cut into; 0: the device finds each one's number.
        partial_rows: rows of partial_o, (partial_rows, d_head_v), and of partial_lse.
        n_sms: SMs that the launch may use; 0: all.
    """

    d_head_v: int
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    softcap: float = 0.0
    sinks: int = 0
    cu_seqlens_q: int = 0
    cu_seqlens_k: int = 0
    seqused_k: int = 0
    total_q: int = 0
    total_k: int = 0
    n_splits: int = 1
    partial_o: int = 0
    partial_lse: int = 0
    block_table: int = 0
    max_pages: int = 0
    page_size: int = 0
    o_float32: bool = False
    kept_sums: int = 0
    seqused_q: int = 0
    plan_slots: int = 0
    plan_shortest: int = 1
    plan_longest: int = 1
    plan_few_queries: int = 0
    plan_fixed: int = 0
    partial_rows: int = 0
    n_sms: int = 0
