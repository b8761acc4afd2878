"""Gradients through functions of the user's in float64, by PyTorch's autograd, and functions to ask for."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from random_functions import BATCH, HEADS, SEQ, function
from random_functions import tables as random_tables
from torch import Tensor

from flash_helpers.test.reference import reference

SEQ_Q, SEQ_K, N_HEADS = 60, 100, 4


def tables() -> dict[str, Tensor]:
    """Captured tensors of real numbers: by head, by distance, dense, by bucket."""
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "slopes": (N_HEADS,),
        "distance": (N_HEADS, SEQ_Q + SEQ_K),
        "bias": (1, 1, SEQ_Q, SEQ_K),
        "few": (5,),
    }
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def mask(b, h, q, k):
    return ((q + k + h + b) % 3 != 0) & (q // 20 >= k // 70)


# Each takes the tables by their names, so that one function serves the library and float64.
SCORES: dict[str, Any] = {
    "alibi": lambda s, b, h, q, k, t: s + t["slopes"][h] * (k - q) * 0.01,
    "soft cap": lambda s, b, h, q, k, t: 1.5 * torch.tanh(s / 1.5),
    "by distance": lambda s, b, h, q, k, t: s * 0.5 + t["distance"][h, q - k + SEQ_K],
    "dense bias": lambda s, b, h, q, k, t: s + t["bias"][0, 0, q, k],
    "nonlinear": lambda s, b, h, q, k, t: s * torch.sigmoid(t["few"][(q + k) % 5] * s) + t["few"][k % 5] ** 2,
    "hides": lambda s, b, h, q, k, t: torch.where(k <= q + 10, s + t["slopes"][h], -math.inf),
    "counts from the end": lambda s, b, h, q, k, t: s + t["few"][k % 5 - 5],
    "no score": lambda s, b, h, q, k, t: t["few"][k % 5] * 1.0 + t["slopes"][h] * 0.0,
}


def float64_gradients(
    rule: Any, inputs: Any, learnt: dict[str, Tensor], given: tuple[Tensor, Tensor], **options: Any
) -> list[Tensor | None]:
    """Those of q, k, v and the tables, by the reference; None: autograd finds that there is none.

    Args:
        rule: a score function that also takes the tables.
        inputs: q, k and v.
        learnt: the tables.
        given: gradients of output and LSE.
        options: those of the reference.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    wide = {name: t.detach().double().requires_grad_() for name, t in learnt.items()}
    out, lse = reference(q, k, v, score_mod=lambda s, b, h, i, j: rule(s, b, h, i, j, wide), **options)
    seen = lse != -math.inf
    loss = (out * given[0].double()).sum() + (lse[seen] * given[1].double()[seen]).sum()
    own = (q, k, v, *wide.values())
    found = torch.autograd.grad(loss, own, allow_unused=True) if loss.requires_grad else [None] * len(own)
    inputs_too = [torch.zeros_like(x) if g is None else g for x, g in zip(own[:3], found[:3], strict=True)]
    return [*inputs_too, *found[3:]]


def dense_attention(
    inputs: Any,
    score_mod: Any = None,
    mask_mod: Any = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of float64 tensors, with all scores at once; rows without a key are 0 and -inf."""
    q, k, v = inputs
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    b, h, i, j = (torch.arange(n, device=q.device) for n in scores.shape)
    grid = (b[:, None, None, None], h[:, None, None], i[:, None], j)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if score_mod is not None:
        scores = torch.broadcast_to(score_mod(scores, *grid), scores.shape)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*grid), scores, -math.inf)
    place = grid[2] + scores.shape[3] - scores.shape[2]
    left, right = window
    outside = torch.zeros((), dtype=torch.bool, device=q.device)
    if left is not None:
        outside = outside | (grid[3] < place - left)
    if right is not None:
        outside = outside | (grid[3] > place + right)
    scores = scores.masked_fill(outside, -math.inf)
    hidden = scores == -math.inf
    nothing = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0.0)  # whose softmax is taken away below
    lse = torch.logsumexp(scores, -1).masked_fill(nothing[..., 0], -math.inf)
    p = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def dense_gradients(
    inputs: Any, given: tuple[Tensor, Tensor], learnt: Any = (), **options: Any
) -> tuple[Tensor, ...]:
    """Those of q, k and v, and of what ``learnt`` has (float64)."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = dense_attention(wide, **options)
    seen = lse != -math.inf
    loss = (out * given[0].double()).sum() + (lse[seen] * given[1].double()[seen]).sum()
    own = (*wide, *learnt)
    found = torch.autograd.grad(loss, own, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True))


def for_each_score(made: Any, scored: bool) -> Any:
    """A function of one score as one of all scores, as flex_attention calls it."""
    for axis in (3, 2, 1, 0):  # b is the outermost
        places = [None if i != axis else 0 for i in range(4)]
        made = torch.vmap(made, in_dims=(0, *places) if scored else tuple(places))

    def call(*given: Tensor) -> Tensor:
        *score, b, h, q, k = given
        return made(*score, *(x.flatten() for x in (b, h, q, k)))

    return call


class RandomCase(NamedTuple):
    """A random score function, and sometimes a mask, with inputs and tables that want gradients."""

    text: str
    inputs: tuple[Tensor, ...]
    learnt: tuple[Tensor, ...]
    mods: dict[str, Any]
    wide: tuple[Tensor, ...]
    wide_mods: dict[str, Any]

    def expected(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Gradients in float64, of the inputs and then the tables."""
        return dense_gradients(self.inputs, given, self.wide, **self.wide_mods)


def random_case(seed: int, device: torch.device, d_head: int = 16, dtype: torch.dtype = torch.float16) -> Any:
    """One of the random functions; its scores stay small, as float32 and float64 have to agree."""
    generator = torch.Generator().manual_seed(seed)
    own = {n: t.to(device) for n, t in random_tables(torch.Generator().manual_seed(seed % 7)).items()}
    own["far"] = own["far"] // 2**33  # of larger ones float32 has no sine
    real = [name for name, t in own.items() if t.is_floating_point()]
    wide = {n: own[n].double().requires_grad_() if n in real else _whole(t) for n, t in own.items()}
    for name in real:
        own[name].requires_grad_()
    mods, wide_mods, texts = {}, {}, []
    kinds = ("score", "mask") if seed % 3 == 0 else ("score",)
    for kind in kinds:
        made, of_wide = (function(seed, kind, captured, smooth=True) for captured in (own, wide))
        texts.append(made.text)
        mods[f"{kind}_mod"] = _bounded(made.function) if kind == "score" else made.function
        wide_mods[f"{kind}_mod"] = _in_float64(of_wide.function, kind == "score")
    make = lambda n: torch.randn(BATCH, SEQ, n, d_head, generator=generator).to(device, dtype)  # noqa: E731
    inputs = tuple(make(n).requires_grad_() for n in (HEADS, 1, 1))
    pick = lambda captured: tuple(captured[name] for name in real)  # noqa: E731
    return RandomCase(" | ".join(texts), inputs, pick(own), mods, pick(wide), wide_mods)


def _whole(t: Tensor) -> Tensor:
    """PyTorch indexes with neither 8 nor 16 bits."""
    return t if t.dtype is torch.bool else t.long()


def _bounded(made: Any) -> Any:
    return lambda s, b, h, q, k: s + 2.0 * torch.tanh(made(s, b, h, q, k) * 0.25)


def _in_float64(made: Any, scored: bool) -> Any:
    def call(*given: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return (_bounded(made) if scored else made)(*given)
        finally:
            torch.set_default_dtype(torch.float32)

    return call
