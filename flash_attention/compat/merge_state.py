"""``merge_state`` of FlashInfer and its like by their names, shapes and meaning.

LSEs are logarithms to the base 2 there: those of this library, natural ones, are these times ln 2.
"""

from __future__ import annotations

from math import log

from torch import Tensor

from flash_attention.checks.keywords import named_keywords
from flash_attention.merge import merge

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]

LN2 = log(2.0)


@named_keywords
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two parts of the keys, from that over each.

    Args:
        v_a: (seq_len, n_heads, d_head), the output for the first part.
        s_a: (seq_len, n_heads), its LSE to the base 2, float32.
        v_b: like v_a, for the second part.
        s_b: like s_a.

    Returns:
        The output like v_a, and its LSE to the base 2, (seq_len, n_heads) float32.

    Raises:
        as ``flash_attention.merge``.
    """
    return _merged([v_a, v_b], [s_a, s_b])


@named_keywords
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """``merge_state`` of any number of parts.

    Args:
        v: (seq_len, n_parts, n_heads, d_head).
        s: (seq_len, n_parts, n_heads), float32.

    Returns, Raises:
        as ``merge_state``.
    """
    return _merged(list(v.unbind(1)), list(s.unbind(1)))


@named_keywords
def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """``merge_state``, written over the first part.

    Args:
        v: (seq_len, n_heads, d_head), written.
        s: (seq_len, n_heads), written.
        v_other: like v.
        s_other: like s.
        mask: (seq_len,) bool, rows to merge; None: all.
    """
    out, lse = _merged([v, v_other], [s, s_other])
    if mask is not None:
        out, lse = out.where(mask[:, None, None], v), lse.where(mask[:, None], s)
    v.copy_(out)
    s.copy_(lse)


def _merged(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = merge(outputs, [lse.float().mul(LN2).transpose(-1, -2) for lse in lses])
    return out, lse.transpose(-1, -2).contiguous() / LN2
