"""What a pass should give: the output in float32, or the gradients of q, k and v."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_helpers.benchmark.correctness import hidden_keys, reference
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.problem import REFERENCE_BYTES, Problem


def expected_of(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, ...]:
    """The reference of a problem of either direction, float32."""
    if problem.direction == FORWARD:
        return reference(q, k, v, problem.causal)
    return gradients(q, k, v, problem.output_gradient(q.device), problem.causal)


@torch.no_grad()
def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``softmax(q k^T / sqrt(d_head)) v`` in float32, sliced as ``reference`` is.

    Args:
        q, k, v, causal, window: as of ``reference``.
        dout: gradient of the output, (batch, seq_len_q, heads, d_head_v).

    Returns:
        dq, dk, dv, of the shapes of q, k, v, float32.
    """
    batch, seq_len_q, heads, d_head = q.shape
    seq_len_k, heads_kv = k.shape[1:3]
    group, scale = heads // heads_kv, d_head**-0.5
    dq, dk, dv = (torch.zeros(x.shape, device=x.device, dtype=torch.float32) for x in (q, k, v))
    rows = max(1, min(seq_len_q, REFERENCE_BYTES // (6 * 4 * heads * max(1, seq_len_k))))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a TF32 product would be no reference
    try:
        for b in range(batch):
            # (heads_kv, 1, keys, d), and (heads_kv, group, queries, d) of what belongs to queries.
            keys, values = (x[b].float().transpose(0, 1)[:, None] for x in (k, v))
            for first in range(0, seq_len_q, rows):
                queries, grads = (
                    x[b, first : first + rows].float().unflatten(1, (heads_kv, group)).permute(1, 2, 0, 3)
                    for x in (q, dout)
                )
                n = queries.shape[2]
                s = queries @ keys.mT * scale
                hidden = hidden_keys(first, n, seq_len_q, seq_len_k, causal, window, q.device)
                if hidden is not None:
                    s.masked_fill_(hidden, float("-inf"))
                p = torch.softmax(s, dim=-1)
                if hidden is not None:
                    p.masked_fill_(hidden.all(dim=-1)[:, None], 0.0)
                dv[b] += (p.mT @ grads).sum(1).transpose(0, 1)
                dp = grads @ values.mT
                ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
                dq[b, first : first + n] = (ds @ keys).permute(2, 0, 1, 3).flatten(1, 2)
                dk[b] += (ds.mT @ queries).sum(1).transpose(0, 1)
    finally:
        torch.set_float32_matmul_precision(precision)
    return dq, dk, dv
