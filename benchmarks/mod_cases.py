"""What ``benchmarks/mods.py`` measures: masks and score functions, their built-in twins, the right result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TOKENS, HIDDEN = 16384, 2048
BUCKETS, EXACT, LONGEST = 32, 16, 128
CAP = 20.0
WIDTH, BLOCK = 64, 96  # of an image, and of block diffusion
SLICE_BYTES = 2**28  # of scores of the reference at once

Mods = dict[str, Any]


class Size(NamedTuple):
    """Lengths of one cell: 16,384 tokens and a hidden size of 2,048, whatever they are divided into."""

    seq_len: int
    d_head: int

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.seq_len)

    @property
    def n_heads(self) -> int:
        return HIDDEN // self.d_head


class Case(NamedTuple):
    """A mask or a score function.

    Attributes:
        name: for tables; the feature of a row.
        mods: makes the keywords of ``attention`` with functions of the user's, for a size and a device.
        twin: makes the keywords that say the same without them; None: there are none.
        lengths: sequences that are measured; None: all.
    """

    name: str
    mods: Callable[[Size, torch.device], Mods]
    twin: Callable[[Size], Mods] | None = None
    lengths: tuple[int, ...] | None = None


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _same_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def _window(size: Size, device: torch.device) -> Mods:
    left = size.seq_len // 8
    return {"mask_mod": lambda b, h, q, k: (q >= k) & (q - k <= left)}


def _documents(ends: Tensor, device: torch.device) -> Mods:
    document = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff()).to(device)
    return {"mask_mod": lambda b, h, q, k: document[q] == document[k]}


def document_ends(size: Size) -> Tensor:
    """0, then the ends of eight documents of different lengths: multiples of 64."""
    shares = torch.tensor([0.0, 1, 3, 4, 6, 11, 13, 15, 16]) / 16
    return (shares * size.seq_len).long()


def odd_ends(size: Size) -> Tensor:
    """The same, at no multiples of 64."""
    moved = torch.tensor([0, 13, -27, 22, 9, -31, 17, -5, 0]) * size.seq_len // 1024
    return document_ends(size) + moved


def _prefix(size: Size, device: torch.device) -> Mods:
    length = size.seq_len // 4
    return {"mask_mod": lambda b, h, q, k: (k < length) | (q >= k)}


def _dilated(size: Size, device: torch.device) -> Mods:
    left = size.seq_len // 8
    return {"mask_mod": lambda b, h, q, k: (torch.abs(q - k) <= left) & (torch.abs(q - k) % 4 == 0)}


def _neighbourhood(size: Size, device: torch.device) -> Mods:
    """Of an image of rows of 64 pixels: those at most 6 rows and columns away."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        rows = torch.abs(q_idx // WIDTH - kv_idx // WIDTH) <= 6
        return rows & (torch.abs(q_idx % WIDTH - kv_idx % WIDTH) <= 6)

    return {"mask_mod": near}


def _block_diffusion(size: Size, device: torch.device) -> Mods:
    """Noisy tokens, then clean ones, in blocks."""
    half = size.seq_len // 2

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        clean_q, clean_k = q_idx >= half, kv_idx >= half
        block_q, block_k = q_idx % half // BLOCK, kv_idx % half // BLOCK
        own = (block_q == block_k) & (clean_q == clean_k)
        before = (block_q > block_k) & clean_k & ~clean_q
        return own | before | ((block_q >= block_k) & clean_q & clean_k)

    return {"mask_mod": seen}


def _tanh(size: Size, device: torch.device) -> Mods:
    return {"score_mod": lambda s, b, h, q, k: torch.tanh(s)}


def _alibi(size: Size, device: torch.device) -> Mods:
    n_heads = size.n_heads
    return {"score_mod": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / n_heads)) * (k - q)}


def _softcap(size: Size, device: torch.device) -> Mods:
    cap = CAP
    return {"score_mod": lambda s, b, h, q, k: cap * torch.tanh(s / cap)}


def _buckets(size: Size, device: torch.device) -> Mods:
    table = _random(3, size.n_heads, BUCKETS).to(device)

    def add(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.abs(q_idx - kv_idx)
        far = torch.log(torch.clamp(distance, min=1) / EXACT) / math.log(LONGEST / EXACT) * (BUCKETS - EXACT)
        bucket = torch.where(distance < EXACT, distance, torch.clamp(EXACT + far.long(), max=BUCKETS - 1))
        return score + table[h, bucket]

    return {"score_mod": add}


def _bias(size: Size, device: torch.device) -> Mods:
    bias = _random(4, size.n_heads, size.seq_len, size.seq_len).to(device, torch.bfloat16)
    return {"score_mod": lambda s, b, h, q, k: s + bias[h, q, k]}


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


CASES = (
    Case("noop", lambda size, device: {"score_mod": _same_score}, lambda size: {}),
    Case("causal", lambda size, device: {"mask_mod": causal}, lambda size: {"causal": True}),
    Case("window", _window, lambda size: {"window": (size.seq_len // 8, 0)}),
    Case(
        "document",
        lambda size, device: _documents(document_ends(size), device),
        lambda size: {"documents": document_ends(size)},
    ),
    Case(
        "odd_document",
        lambda size, device: _documents(odd_ends(size), device),
        lambda size: {"documents": odd_ends(size)},
    ),
    Case("prefix", _prefix),
    Case("alibi", _alibi),
    Case("softcap", _softcap, lambda size: {"softcap": CAP}),
    Case("buckets", _buckets, lengths=(4096,)),
    Case("bias", _bias, lengths=(4096,)),
    Case("dilated", _dilated, lengths=(4096,)),
    Case("neighbourhood", _neighbourhood, lengths=(4096,)),
    Case("block_diffusion", _block_diffusion, lengths=(4096,)),
    Case("tanh", _tanh, lengths=(4096,)),
)


class Inputs(NamedTuple):
    """Tensors of a cell, (batch, seq, heads, d), bfloat16; ``dout``: the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def inputs(size: Size, device: torch.device) -> Inputs:
    """The same in every process."""
    shape = (size.batch, size.seq_len, size.n_heads, size.d_head)
    generator = torch.Generator(device).manual_seed(size.seq_len + size.d_head)
    make = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]
    return Inputs(*make)


def expected(mods: Mods, x: Inputs, backward: bool) -> Tensor | tuple[Tensor, ...]:
    """The output, or the gradients of q, k and v, in float32, of some queries of one head at once."""
    batch, seq_len, n_heads, d_head = x.q.shape
    rows = max(1, min(seq_len, SLICE_BYTES // (4 * seq_len)))
    k_idx = torch.arange(seq_len, device=x.q.device)
    out = torch.zeros(x.q.shape, dtype=torch.float32, device=x.q.device)
    grads = [torch.zeros_like(out) for _ in range(3)]
    for b in range(batch):
        for h in range(n_heads):
            k, v = (t[b, :, h].float().requires_grad_(backward) for t in (x.k, x.v))
            for first in range(0, seq_len, rows):
                part = slice(first, min(first + rows, seq_len))
                q = x.q[b, part, h].float().requires_grad_(backward)
                q_idx = torch.arange(part.start, part.stop, device=q.device)[:, None]
                places = (torch.tensor(b, device=q.device), torch.tensor(h, device=q.device), q_idx, k_idx)
                scores = q @ k.mT * d_head**-0.5
                if "score_mod" in mods:
                    scores = mods["score_mod"](scores, *places)
                if "mask_mod" in mods:
                    scores = scores.masked_fill(~mods["mask_mod"](*places), -math.inf)
                made = torch.softmax(scores, -1) @ v
                out[b, part, h] = made.detach()
                if backward:
                    dq, dk, dv = torch.autograd.grad(made, (q, k, v), x.dout[b, part, h].float())
                    grads[0][b, part, h] = dq
                    grads[1][b, :, h] += dk
                    grads[2][b, :, h] += dv
    return tuple(grads) if backward else out
