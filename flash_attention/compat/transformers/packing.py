"""Several sequences in the rows of one batch: where they start, and attention within each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attention.attention import attention_varlen


@dataclass(frozen=True, eq=False)
class Packing:
    """Offsets and longest lengths, as ``attention_varlen`` takes them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def within_sequences(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]) -> Tensor:
    """Attention of all rows, each within its sequence; (batch, seq_len_q, n_heads, d_head_v)."""
    rows: Any = [x.flatten(0, 1) for x in (q, k, v)]
    offsets: Any = (packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k)
    out: Any = attention_varlen(*rows, *offsets, **options)
    return out.view(*q.shape[:3], v.shape[3])


def given_packing(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
    q: Tensor,
    k: Tensor,
) -> Packing | None:
    """What the caller says in ``cu_seq_lens_q`` and the three arguments beside it; None: nothing.

    Raises:
        ValueError: only some of the four are there.
    """
    given = {
        "cu_seq_lens_q": cu_seqlens_q,
        "cu_seq_lens_k": cu_seqlens_k,
        "max_length_q": max_length_q,
        "max_length_k": max_length_k,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        there = ", ".join(name for name in given if name not in missing)
        raise ValueError(
            f"{there} came without {', '.join(missing)}; packed sequences need all four, or none"
        )
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    return Packing(
        cu_seqlens_q.to(q.device, torch.int32),
        cu_seqlens_k.to(q.device, torch.int32),
        _longest(max_length_q, q),
        _longest(max_length_k, k),
    )


def _longest(length: Any, x: Tensor) -> int:
    if isinstance(length, Tensor) and torch.compiler.is_compiling():
        return x.shape[0] * x.shape[1]  # a bound that is known without the device
    return int(length)


def packing_of_starts(starts: Tensor) -> Packing:
    """
    Args:
        starts: (batch, seq_len) bool, True where a sequence starts; in the first column everywhere.
    """
    batch, seq_len = starts.shape
    begins = starts.flatten().nonzero().flatten()
    offsets = torch.cat((begins, begins.new_tensor([batch * seq_len]))).int()
    longest = int(offsets.diff().max())
    return Packing(offsets, offsets, longest, longest)


def starts_of_positions(position_ids: Tensor) -> Tensor | None:
    """Where sequences start by their positions; None: each item is one sequence.

    A sequence starts where positions are the smallest ones again, as in Transformers' own flash code.

    Args:
        position_ids: (batch, seq_len).

    Raises:
        NotImplementedError: positions return to the smallest one, but do not count from there.
    """
    starts = position_ids == position_ids.min(1, keepdim=True).values
    counts_on = (position_ids.diff(dim=1) == 1) | starts[:, 1:]
    are_alone, are_clear = torch.stack(
        [starts[:, 0].all() & ~starts[:, 1:].any(), starts[:, 0].all() & counts_on.all()]
    ).tolist()
    if are_alone:
        return None
    if are_clear:
        return starts
    raise NotImplementedError(
        f"position_ids return to the smallest one but do not count by one from there: "
        f"{_short(position_ids)}; whether that is packed sequences is not clear: "
        "pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and "
        "max_length_k, or positions that start anew for each sequence"
    )


def _short(position_ids: Tensor) -> str:
    row = position_ids[0].tolist()
    return f"{row[:12]}"[:-1] + (", …]" if len(row) > 12 else "]")
