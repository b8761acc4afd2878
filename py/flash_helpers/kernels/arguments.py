"""What a launch reads out of tuples; the binding's list of a backward launch's members is generated."""

from __future__ import annotations

from typing import NamedTuple

Strides = tuple[int, ...]
"""Of a tensor's four axes, in elements; the last is 1."""

UNBOUNDED = 2**30 - 1
"""A side of the window that has no bound; no sequence under a window is longer."""


class ModArguments(NamedTuple):
    """What the functions of a mod captured, for a launch of a kernel with it (``flash::ModArguments``).

    Attributes:
        numbers: in the mod's order, each of the type that the mod has for it.
        tensors: in the mod's order, each as (address, strides in elements, sizes).
        tiles: what is known of the mask's tiles (``flash::ModTiles``): address, and strides in words of a
            batch item, a head and a row; None: nothing.
    """

    numbers: tuple[int | float, ...]
    tensors: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    tiles: tuple[int, int, int, int] | None = None


class BackwardArguments(NamedTuple):
    """What one backward launch is given, by the names of ``flash::BackwardProblem``, where each is explained.

    Attributes:
        q, k, v, o, dout: addresses.
        lse, dlse: addresses of float32 rows; 0: no gradient of the LSE.
        dq, dk, dv: addresses that are written; 0: not wanted.
        q_strides, k_strides, v_strides, o_strides, dout_strides, dq_strides, dk_strides, dv_strides: of each.
        batch, n_heads, n_heads_kv, seq_len_q, seq_len_k, d_head, d_head_v: sizes.
        softmax_scale: factor of the scores.
        window_left, window_right: limits of either sign, or ``UNBOUNDED``.
        softcap: 0 without the trait.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: addresses of int32 numbers, or 0.
        total_q, total_k: rows of packed tensors in all.
    """

    q: int
    k: int
    v: int
    o: int
    dout: int
    lse: int
    dlse: int
    dq: int
    dk: int
    dv: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    o_strides: Strides
    dout_strides: Strides
    dq_strides: Strides
    dk_strides: Strides
    dv_strides: Strides
    batch: int
    n_heads: int
    n_heads_kv: int
    seq_len_q: int
    seq_len_k: int
    d_head: int
    d_head_v: int
    softmax_scale: float
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    softcap: float = 0.0
    cu_seqlens_q: int = 0
    cu_seqlens_k: int = 0
    seqused_q: int = 0
    seqused_k: int = 0
    total_q: int = 0
    total_k: int = 0
