"""What a problem costs: visible pairs, FLOP and bytes. The one formula of every table and report.

FLOP of a forward pass = 4 * batch * heads * d_head * visible pairs: two products of 2 * d_head
operations for each (query, key) pair that the mask lets through. Softmax work is not counted. FLOP of a
backward pass = 2.5 times that: five products.
"""

from __future__ import annotations

Window = tuple[int | None, int | None]


def visible_pairs(seq_len_q: int, seq_len_k: int, causal: bool = False, window: Window = (None, None)) -> int:
    """The exact number of (query, key) pairs that are visible for one head.

    Query i stands at key position p = i + (seq_len_k - seq_len_q): masks are aligned bottom-right.

    Args:
        seq_len_q: queries.
        seq_len_k: keys.
        causal: key j is visible when j <= p.
        window: (left, right): key j is visible when p - left <= j <= p + right; None: no bound.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    whole = seq_len_q * seq_len_k
    up_to = whole if right is None else _keys_before(right + 1, seq_len_q, seq_len_k)
    below = 0 if left is None else _keys_before(-left, seq_len_q, seq_len_k)
    return max(0, up_to - below)


def _keys_before(distance: int, seq_len_q: int, seq_len_k: int) -> int:
    """Over all queries, the keys before p + distance: the sum of min(max(p + distance, 0), seq_len_k)."""

    def clamped_below(end: int) -> int:  # the sum of min(max(x, 0), seq_len_k) over all x < end
        rising = min(max(end - 1, 0), seq_len_k)
        return rising * (rising + 1) // 2 + max(end - 1 - seq_len_k, 0) * seq_len_k

    first = seq_len_k - seq_len_q + distance
    return clamped_below(first + seq_len_q) - clamped_below(first)


def attention_flop(batch: int, heads: int, d_head: int, pairs: int) -> int:
    """FLOP of a forward pass with ``pairs`` visible pairs in each of ``batch * heads`` heads."""
    return 4 * batch * heads * d_head * pairs


def backward_flop(forward_flop: int) -> int:
    """FLOP of the gradients, by the field's count: 5 products to the forward pass's 2."""
    return forward_flop * 5 // 2


def attention_bytes(
    batch: int, heads: int, heads_kv: int, seq_len_q: int, seq_len_k: int, d_head: int, itemsize: int = 2
) -> int:
    """The fewest bytes a forward pass can move: Q, K and V read once, O written once."""
    return batch * d_head * itemsize * (2 * heads * seq_len_q + 2 * heads_kv * seq_len_k)
