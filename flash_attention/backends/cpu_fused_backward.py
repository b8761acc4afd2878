"""PyTorch's own fused backward pass on the CPU, for calls that its fused attention has computed.

It is asked in float32. In 16 bit it rounds the sums of dK and dV after every block of queries, so that the
error grows with their number: three times that of the CPU backend at 4096 queries. In float32 it is more
exact than the CPU backend, which rounds P and dS, and 1.5 times as fast. It rounds once, at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attention.backends.cpu_backward import Gradients
from flash_attention.backends.cpu_fused import Part, calls_of, is_triangle, mask_of_reversed
from flash_attention.backends.full_precision import full_precision
from flash_attention.backends.visibility import Visibility

_fused: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def reason_against(softcap: bool, mods: bool = False, dropout: bool = False) -> str | None:
    """Why PyTorch's backward pass does not compute such calls, or None."""
    if _fused is None:
        return f"torch {torch.__version__} does not have it"
    if mods:
        return "it has no score_mod and no mask_mod"
    if dropout:
        return "its random bits are others than this library's"
    return "it has no soft cap" if softcap else None


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    gradients: Gradients,
    left: int | None,
    right: int | None,
) -> list[Part]:
    """Gradients of q, k and v of attention without a soft cap; arguments as in ``cpu_backward.backward``.

    Sinks act through the LSE. A gradient of the LSE is one more column: of O it is -dLSE, of dO 1 and of V 0,
    so that ``rowsum(dO * O)`` becomes D and no product changes.

    Returns:
        What is left for ``cpu_backward.backward``: the kv heads of a batch item, each by itself, of which a
        query that sees a key has an LSE that is not finite; all in one where a scale of 0 meets a mask, or
        where PyTorch has no such operator or raises.
    """
    batch, seq_len_q, _, _ = q.shape
    seq_len_k, n_heads_kv = k.shape[1:3]
    everything = [Part(slice(0, batch), slice(0, n_heads_kv))]
    visibility = Visibility(left, right, seq_len_k - seq_len_q)
    if _fused is None or (softmax_scale == 0 and not visibility.unlimited):
        return everything
    seeing = _part_of(seq_len_q, visibility.queries_of(0, seq_len_k))
    seen = _part_of(seq_len_k, visibility.keys_of(0, seq_len_q))
    if not seq_len_k or seeing.start == seeing.stop or seen.start == seen.stop:
        return everything
    sign = -1.0 if softmax_scale < 0 else 1.0  # it scales what it has hidden, too
    if dlse is not None and not dlse.any():
        dlse = None  # the same bits as without it
    sums = _Sums(do, q, k, v, o, lse, dlse, sign)
    try:
        with full_precision:
            for queries, keys in calls_of(visibility, seeing, seq_len_k):
                causal = is_triangle(visibility, queries, keys)
                mask = None if causal else mask_of_reversed(visibility, queries, keys, torch.float32)
                sums.add(queries, keys, causal, mask, abs(softmax_scale))
    except RuntimeError:
        return everything
    sums.write(gradients)
    known = lse[:, :, seeing].isfinite().all(-1).unflatten(1, (n_heads_kv, -1)).all(-1)
    left_over = (~known).nonzero().tolist()
    return [Part(slice(item, item + 1), slice(head, head + 1)) for item, head in left_over]


def _part_of(length: int, limits: tuple[int, int]) -> slice:
    begin = min(max(limits[0], 0), length)
    return slice(begin, max(min(limits[1], length), begin))


class _Sums:
    """Inputs and gradients: (batch, kv heads, group, queries, d) and (batch, kv heads, keys, d).

    Gradients are float32. Those of rows that no call takes stay zero, and the rows are not read.
    """

    def __init__(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        sign: float,
    ) -> None:
        n_heads_kv = k.shape[2]
        self.do, self.q, self.o = (
            x.unflatten(2, (n_heads_kv, -1)).permute(0, 2, 3, 1, 4) for x in (do, q, o)
        )
        self.lse = lse.unflatten(1, (n_heads_kv, -1))
        self.dlse = None if dlse is None else dlse.unflatten(1, (n_heads_kv, -1))
        self.columns = max(q.shape[-1], v.shape[-1] + (0 if dlse is None else 1))
        self.k, self.v = k.transpose(1, 2), v.transpose(1, 2)
        self.sign = sign
        self.dq, self.dk, self.dv = (
            torch.zeros(x.shape, dtype=torch.float32, device="cpu") for x in (self.q, self.k, self.v)
        )

    def add(self, queries: slice, keys: slice, causal: bool, mask: Tensor | None, scale: float) -> None:
        """Adds what these queries give to the gradients of these keys, and writes their own."""

        def ordered(x: Tensor, axis: int) -> Tensor:
            return (x if mask is None else x.flip(axis)).contiguous()  # flips keep strides

        do, q, o = (self._wide(x[..., queries, :]) for x in (self.do, self.q, self.o))
        if self.dlse is not None:
            last = self.v.shape[-1]
            do[..., last], o[..., last] = 1.0, -self.dlse[..., queries]
        do, q, o = (ordered(x, -2) for x in (do, q, o))
        lse = ordered(self.lse[..., queries], -1)
        k, v = (self._wide(x[:, :, keys]).contiguous() for x in (self.k, self.v))
        if self.sign < 0:
            q = -q
        batch, _, group = q.shape[:3]
        # One call takes the heads of a group one beside the other, or one head of each group.
        for i in range(batch if batch < group else group):
            if batch < group:
                at: Any = i
                key, value = (x[i, :, None].expand(-1, group, -1, -1) for x in (k, v))
            else:
                at, key, value = (slice(None), slice(None), i), k, v
            sums = lse[at].transpose(1, 2).contiguous().transpose(1, 2)  # the strides that PyTorch gives it
            dq, dk, dv = _fused(
                do[at], q[at], key, value, o[at], sums, 0.0, causal, attn_mask=mask, scale=scale
            )
            dq, dk, dv = dq[..., : self.q.shape[-1]], dk[..., : self.k.shape[-1]], dv[..., : self.v.shape[-1]]
            self.dq[at][..., queries, :] = dq if mask is None else dq.flip(-2)
            for total, part in ((self.dk, dk), (self.dv, dv)):
                if batch < group:
                    total[i][:, keys] += part.sum(1)
                else:
                    total[:, :, keys] += part

    def _wide(self, x: Tensor) -> Tensor:
        """In float32, with as many columns as PyTorch is to get of all tensors."""
        return pad(x.float(), (0, self.columns - x.shape[-1]))

    def write(self, gradients: Gradients) -> None:
        """Rounds once."""
        if gradients.dq is not None:
            gradients.dq.copy_(self.dq.mul_(self.sign).permute(0, 3, 1, 2, 4).flatten(2, 3))
        if gradients.dk is not None:
            gradients.dk.copy_(self.dk.transpose(1, 2))
        if gradients.dv is not None:
            gradients.dv.copy_(self.dv.transpose(1, 2))
