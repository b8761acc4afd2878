"""Is an output right? A float32 reference in slices, and the errors that a benchmark tolerates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import REFERENCE_BYTES

# Relative error of a whole output with standard normal inputs. Rounding P and O once to the input
# type makes about one unit in the last place: 2^-11 (fp16), 2^-8 (bf16). Four units are allowed.
TOLERANCE = {DType.FP16: 2e-3, DType.BF16: 1.6e-2}
ROW_FACTOR = 4  # the worst single row may err by this much more than the whole


@dataclass(frozen=True)
class OutputError:
    """Distance of an output from the reference.

    Attributes:
        relative: |o - ref| / |ref| over the whole tensor (Euclidean norms).
        worst_row: the same over one output row of d_head elements, the worst of all.
    """

    relative: float
    worst_row: float

    def wrong_reason(self, dtype: DType) -> str | None:
        """Why the output counts as wrong, or None. A NaN is always wrong."""
        limit = TOLERANCE[dtype]
        if not self.relative <= limit:
            return f"relative error {self.relative:.3g}, allowed {limit:.3g}"
        if not self.worst_row <= ROW_FACTOR * limit:
            return f"relative error of the worst row {self.worst_row:.3g}, allowed {ROW_FACTOR * limit:.3g}"
        return None


@torch.no_grad()
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d_head)) v in float32, sliced so that it never needs more than about 1 GiB.

    float32 rounds a thousandth of what ``TOLERANCE`` allows, and takes the largest problems in seconds.

    Args:
        q: (batch, seq_len_q, heads, d_head).
        k: (batch, seq_len_k, heads_kv, d_head); query head h reads kv head h // (heads / heads_kv).
        v: (batch, seq_len_k, heads_kv, d_head_v).
        causal: key j is visible to query i when j <= i + (seq_len_k - seq_len_q); a query that
            sees no key gives 0.
        window: keys to the left and right of the query's own place that it sees; None: all.
        softcap: logits become softcap tanh(logit / softcap); 0: they stay.
        sinks: (heads,), one more logit a head, without a value.

    Returns:
        (batch, seq_len_q, heads, d_head_v), float32.
    """
    batch, seq_len_q, heads, d_head = q.shape
    seq_len_k, heads_kv, d_head_v = k.shape[1], k.shape[2], v.shape[3]
    out = torch.empty(*q.shape[:3], d_head_v, device=q.device, dtype=torch.float32)
    rows = max(1, min(seq_len_q, REFERENCE_BYTES // (4 * 4 * heads * max(1, seq_len_k))))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a TF32 product would be no reference
    try:
        for b in range(batch):
            keys, values = (x[b].float().transpose(0, 1) for x in (k, v))  # (heads_kv, seq_len_k, d)
            for first in range(0, seq_len_q, rows):
                queries = q[b, first : first + rows].float().transpose(0, 1) * d_head**-0.5
                n = queries.shape[1]
                # The heads that share keys stand below each other.
                shared = heads // heads_kv * n
                scores = queries.reshape(heads_kv, shared, d_head) @ keys.transpose(1, 2)
                scores = scores.view(heads, n, seq_len_k)
                if softcap:
                    scores.div_(softcap).tanh_().mul_(softcap)
                hidden = hidden_keys(first, n, seq_len_q, seq_len_k, causal, window, q.device)
                if hidden is not None:
                    scores.masked_fill_(hidden, float("-inf"))
                weights = _softmax(scores, sinks)
                if hidden is not None:
                    weights.masked_fill_(hidden.all(dim=-1)[:, None], 0.0)
                product = weights.reshape(heads_kv, shared, seq_len_k) @ values
                out[b, first : first + n] = product.view(heads, n, d_head_v).transpose(0, 1)
    finally:
        torch.set_float32_matmul_precision(precision)
    return out


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of (heads, n, seq_len_k), with a head's sink in the sum."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    more = sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat([scores, more], dim=-1), dim=-1)[..., :-1]


def hidden_keys(
    first: int,
    n: int,
    seq_len_q: int,
    seq_len_k: int,
    causal: bool,
    window: tuple[int | None, int | None],
    device: torch.device,
) -> Tensor | None:
    """(n, seq_len_k) of the queries from ``first`` on: True where the key is not seen; None: all are."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    place = torch.arange(first, first + n, device=device)[:, None] + (seq_len_k - seq_len_q)
    key = torch.arange(seq_len_k, device=device)
    hidden = torch.zeros(n, seq_len_k, dtype=torch.bool, device=device)
    if left is not None:
        hidden |= key < place - left
    if right is not None:
        hidden |= key > place + right
    return hidden


def output_error(o: Tensor, ref: Tensor) -> OutputError:
    """Compares ``o`` with ``ref``, both (batch, seq_len, heads, d_head) or packed, (total, heads, d_head).

    Raises:
        ValueError: the shapes differ.
    """
    if o.shape != ref.shape:
        raise ValueError(f"the output has shape {tuple(o.shape)}, the reference {tuple(ref.shape)}")
    row_error = (o.float() - ref).norm(dim=-1)
    row_norm = ref.norm(dim=-1)
    whole = row_error.norm() / row_norm.norm().clamp_min(1e-30)
    # A row whose values nearly cancel has no meaningful relative error: compare it with a typical row, of all
    # and of its place in the sequence. Under a causal mask gradients of the first rows, of few keys, are much
    # larger than others, and what one of them loses because O was rounded is, too.
    floor = row_norm.mean().clamp_min(1e-30)
    # Of (batch, seq, heads) items and heads share a place; of packed rows, (total, heads), heads alone.
    shared = (0, 2) if row_norm.ndim == 3 else (1,)
    floor = floor.maximum(row_norm.mean(shared, keepdim=True))
    worst = (row_error / row_norm.maximum(floor)).max()
    return OutputError(relative=whole.item(), worst_row=worst.item())
