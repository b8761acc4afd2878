"""Cases of context-parallel attention: what each rank computes, one process, and the float64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from float32_path import in_float32
from torch import Tensor

import flash_attention
from flash_attention import distributed as cp
from flash_attention.call import Mask
from flash_attention.distributed import heads
from flash_helpers.test.reference import reference, reference_gradients

LEAST = heads.LEAST_BLOCKS, heads.LEAST_KEY_BLOCKS


@dataclass(frozen=True)
class Case:
    """One call with gradients. ``layout`` is the name of a constructor, or ``uneven``."""

    method: str = "ring"
    layout: str = "zigzag"
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sinks: bool = False
    documents: tuple[int, ...] | None = None
    total: int = 61
    batch: int = 1
    n_heads: int = 4
    n_heads_kv: int = 2
    d_head: int = 16
    d_head_v: int = 8
    scale: float | None = None
    with_lse: bool = True
    in_parts: bool = False  # heads come in two exchanges, however little work they are
    functions: str = ""  # of FUNCTIONS

    def make_layout(self, world: int) -> cp.Layout:
        if self.layout == "per_document":
            return cp.Layout.per_document(self.documents or (0, self.total), world)
        if self.layout == "uneven":  # the last rank has nothing, the first most
            cuts = [self.total - self.total // (1 << rank) for rank in range(world)] + [self.total]
            cuts[-1 if world == 1 else -2] = self.total
            pieces = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
            return cp.Layout.explicit(pieces, documents=self.documents)
        if self.layout == "windowed":
            return cp.Layout.windowed(self.total, world, self.window[0] or 0, documents=self.documents)
        make: Callable[..., cp.Layout] = getattr(cp.Layout, self.layout)
        return make(self.total, world, documents=self.documents)


Functions = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


def _functions() -> dict[str, Functions]:
    """Of scores and of masks, by names that travel between processes."""
    table, slopes, period = torch.arange(7.0) / 4, torch.tensor([0.5, -0.25, 0.125, 1.0, 0.75, -1.0]), 5

    def bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 0.5 + slopes[h] * (q - k) / 16 + table[q % 7] * (b + 1)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // period + k // 3 + h) % 4 != 0) | (q == k)

    return {
        "": (None, None),
        "both": (bias, mask),
        "score": (bias, None),
        "mask": (None, lambda b, h, q, k: (q >= k) & ((q - k < 11) | (k < 4))),
    }


FUNCTIONS = _functions()


def functions_of(case: Case, first: int = 0) -> dict[str, Any]:
    """Those of a case as keywords, where the first position is another one."""
    score, mask = FUNCTIONS[case.functions]
    return {
        "score_mod": score and (lambda s, b, h, q, k: score(s, b, h, q + first, k + first)),
        "mask_mod": mask and (lambda b, h, q, k: mask(b, h, q + first, k + first)),
    }


class Tensors(NamedTuple):
    """The tensors of a case: of all rows, or those of a rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor | None


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def tensors(case: Case, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(case.total * 31 + case.n_heads)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(dtype)

    rows = (case.batch, case.total)
    return Tensors(
        make(*rows, case.n_heads, case.d_head),
        make(*rows, case.n_heads_kv, case.d_head),
        make(*rows, case.n_heads_kv, case.d_head_v),
        make(*rows, case.n_heads, case.d_head_v),
        make(case.batch, case.n_heads, case.total).float() * case.with_lse,
        make(case.n_heads).float() if case.sinks else None,
    )


# ---------------------------------------------------------------------- on a rank
def on_rank(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """A rank's rows of the results, with the share of the sinks' gradient. float32 goes past the checks."""
    layout, rank = case.make_layout(dist.get_world_size()), dist.get_rank()
    heads.LEAST_BLOCKS, heads.LEAST_KEY_BLOCKS = (0, 0) if case.in_parts else LEAST
    whole = tensors(case, dtype)
    q, k, v, dout = (layout.shard(x, rank).requires_grad_() for x in whole[:4])
    sinks = None if whole.sinks is None else whole.sinks.requires_grad_()
    if dtype is torch.float32:
        out, lse = in_float32(
            q, k, v, sinks, layout=layout, method=case.method, scale=case.scale, softcap=case.softcap,
            mask=Mask.of(case.causal, case.window), functions=FUNCTIONS[case.functions],
        )  # fmt: skip
    else:
        out, lse = cp.attention(
            q, k, v, layout=layout, causal=case.causal, window=case.window, softcap=case.softcap,
            sinks=sinks, return_lse=True, method=case.method, softmax_scale=case.scale,  # type: ignore[arg-type]
            **functions_of(case),
        )  # fmt: skip
    inputs = [q, k, v, *([sinks] if sinks is not None else [])]
    dlse = layout.shard(whole.dlse, rank, 2)
    seen = lse != -torch.inf
    given, cotangents = [out], [dout.detach()]
    if case.with_lse:
        given.append(lse)
        cotangents.append(dlse.masked_fill(~seen, 0.0))
    grads = torch.autograd.grad(given, inputs, cotangents)
    return tuple(x.detach().float().numpy() for x in (out, lse, *grads))


def on_gpu(case: Case) -> tuple[list[Any], list[Any]]:
    """A rank's rows of the results by NCCL, then those of one GPU for all rows."""
    rank = dist.get_rank()
    layout = case.make_layout(dist.get_world_size())
    whole = Tensors(*(None if x is None else x.cuda() for x in tensors(case, torch.bfloat16)))  # type: ignore[arg-type]
    given: dict[str, Any] = dict(sinks=whole.sinks, return_lse=True, deterministic=True, **options(case))

    q, k, v, dout = (layout.shard(x, rank) for x in whole[:4])
    found = _with_gradients(
        (q, k, v), whole.sinks, (dout, layout.shard(whole.dlse, rank, 2)),
        lambda q, k, v: cp.attention(q, k, v, layout=layout, method=case.method, **given),  # type: ignore[arg-type]
    )  # fmt: skip

    def by_documents(q: Tensor, k: Tensor, v: Tensor) -> Any:
        ends = itertools.pairwise(case.documents or (0, case.total))
        parts = [
            flash_attention.attention(*(x[:, a:b] for x in (q, k, v)), **given) for a, b in ends if a < b
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)

    single = _with_gradients(whole[:3], whole.sinks, (whole.dout, whole.dlse), by_documents)
    return found, single


def _with_gradients(
    qkv: Sequence[Tensor], sinks: Tensor | None, cotangents: Sequence[Tensor], call: Callable[..., Any]
) -> list[Any]:
    """Output, LSE and the gradients of all inputs, as arrays."""
    inputs = [x.detach().requires_grad_() for x in qkv] + ([] if sinks is None else [sinks.requires_grad_()])
    out, lse = call(*inputs[:3])
    dout, dlse = cotangents
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse.masked_fill(lse == -torch.inf, 0.0)))
    return [x.detach().float().cpu().numpy() for x in (out, lse, *grads)]


# ---------------------------------------------------------------------- in one process
def gathered(case: Case, answers: list[Any]) -> Results:
    """The results of all ranks as of the whole sequence."""
    layout = case.make_layout(len(answers))
    by_rank = [[torch.from_numpy(x) for x in answer] for answer in answers]
    out, dq, dk, dv = (layout.unshard([answer[i] for answer in by_rank]) for i in (0, 2, 3, 4))
    lse = layout.unshard([answer[1] for answer in by_rank], 2)
    dsinks = sum(answer[5] for answer in by_rank) if case.sinks else None
    return Results(out, lse, dq, dk, dv, dsinks)  # type: ignore[arg-type]


def by_document(case: Case, one: Callable[[Tensors, int], Results], dtype: torch.dtype) -> Results:
    """A function of one document and its first position for all of them."""
    whole = tensors(case, dtype)
    ends = case.documents or (0, case.total)
    found = []
    for first, last in itertools.pairwise(ends):
        rows = slice(first, last)
        of_document = Tensors(*(x[:, rows] for x in whole[:4]), whole.dlse[:, :, rows], whole.sinks)
        found.append(one(of_document, first))
    parts = [torch.cat([getattr(r, name) for r in found], 1) for name in ("out", "dq", "dk", "dv")]
    lse = torch.cat([r.lse for r in found], 2)
    dsinks = sum(r.dsinks for r in found) if case.sinks else None
    return Results(parts[0], lse, *parts[1:], dsinks)  # type: ignore[arg-type]


def options(case: Case) -> dict[str, Any]:
    return dict(causal=case.causal, window=case.window, softcap=case.softcap, softmax_scale=case.scale)


def exact(case: Case) -> Results:
    """In float64, independent of all backends."""
    return _exact(replace(case, method="", layout=""))


@cache
def _exact(case: Case) -> Results:

    def one(x: Tensors, first: int) -> Results:
        given = {**options(case), **functions_of(case, first)}
        out, lse = reference(x.q, x.k, x.v, sinks=x.sinks, **given)
        if not x.q.shape[1]:  # there is nothing to differentiate
            dsinks = None if x.sinks is None else torch.zeros_like(x.sinks)
            return Results(out, lse, *(torch.zeros_like(y).double() for y in x[:3]), dsinks)
        dlse = x.dlse if case.with_lse else None
        grads = reference_gradients(x.q, x.k, x.v, x.dout, dlse, sinks=x.sinks, **given)
        return Results(out, lse, *grads)

    return by_document(case, one, torch.bfloat16)  # the numbers are those of bfloat16 in any type


def alone(case: Case) -> Results:
    """In bfloat16 by one process: what the library computes without ranks."""
    return _alone(replace(case, method="", layout=""))


@cache
def _alone(case: Case) -> Results:

    def one(x: Tensors, first: int) -> Results:
        q, k, v = (y.detach().requires_grad_() for y in x[:3])
        sinks = None if x.sinks is None else x.sinks.detach().requires_grad_()
        given = {**options(case), **functions_of(case, first)}
        out, lse = flash_attention.attention(q, k, v, sinks=sinks, return_lse=True, **given)
        dlse = x.dlse.masked_fill(lse == -torch.inf, 0.0)
        results, cotangents = ([out, lse], [x.dout, dlse]) if case.with_lse else ([out], [x.dout])
        inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
        grads = torch.autograd.grad(results, inputs, cotangents)
        return Results(out.detach(), lse.detach(), *grads[:3], None if sinks is None else grads[3])

    return by_document(case, one, torch.bfloat16)


def error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the differences; where both are -inf there is none."""
    found, wanted = found.double(), wanted.double()
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    difference = (found - wanted).masked_fill(wanted == -torch.inf, 0.0)
    return float(difference.square().mean().sqrt()) if difference.numel() else 0.0
