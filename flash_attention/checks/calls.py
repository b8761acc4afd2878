"""Checks of the tensors that every call has, beyond those of ``tensors``; of a named choice; of a problem."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.checks.configs import check_config
from flash_attention.checks.options import checked_flag, checked_sms, checked_window, given
from flash_attention.checks.tensors import (
    check_devices,
    check_dtypes,
    check_no_gradient,
    check_output,
    check_tensors,
    shapes_of,
)
from flash_attention.devices import DEVICE_TYPES
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig
from flash_helpers.kernels.numeric_class import INVARIANT
from flash_helpers.kernels.problem import BACKWARD, FORWARD, HEAD_SIZES, AttentionProblem

DTYPES = {torch.float16: DType.FP16, torch.bfloat16: DType.BF16}


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: str,
    paged: bool = False,
    padded: bool = False,
    any_dtype: bool = False,
    device_types: tuple[str, ...] | None = None,
    names: tuple[str, str, str] = ("q", "k", "v"),
    layout_kv: str | None = None,
) -> None:
    """Types, devices, shapes and head counts.

    Args:
        layout: ``(batch, seq, heads, d)`` or ``(total, heads, d)``.
        layout_kv: that of k and v, if another.
        paged: the first dimension of k and v counts pages, not batch items.
        padded: other head sizes up to the largest are taken, too: the caller pads them.
        any_dtype, device_types: as in ``check_kinds``.
        names: of the tensors in the caller's call, for messages.

    Raises:
        TypeError, NotImplementedError, ValueError: as the checks of ``forward`` do.
    """
    nq, nk, nv = names
    inputs = {nq: q, nk: k, nv: v}
    check_tensors(inputs if sinks is None else {**inputs, "sinks": sinks})
    check_kinds(inputs, any_dtype, device_types)
    rank = layout.count(",") + 1
    if layout_kv not in (None, layout):
        if (q.ndim, k.ndim, v.ndim) != (rank, 4, 4):
            raise ValueError(
                f"{nq} must be {layout}, and {nk} and {nv} {layout_kv} or, with block_table, (n_pages, "
                f"page_size, heads, d); given {shapes_of(inputs)}: keys that are packed need cu_seqlens_k"
            )
    elif not q.ndim == k.ndim == v.ndim == rank:
        other = "attention_varlen takes packed sequences" if rank == 4 else "attention takes padded ones"
        if rank == 3 and (q.ndim, k.ndim, v.ndim) == (3, 4, 4):
            other = (
                "k and v look like a cache, or pages: pass cu_seqlens_k=None, and as seqused_k how many keys "
                "each sequence has"
            )
        raise ValueError(f"{nq}, {nk} and {nv} must be {layout}; given {shapes_of(inputs)}; {other}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{nk} and {nv} must agree in all but the head size; given {shapes_of(inputs)}")
    if rank == 4 and not paged and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"{nq}, {nk} and {nv} must have one batch size; given {shapes_of(inputs)}: use {nk}.expand(…) "
            "to share keys"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{nq} and {nk} must have one head size; given {shapes_of(inputs)}")
    check_head_sizes(q.shape[-1], v.shape[-1], (f"{nq} and {nk}", nv), padded=padded)
    check_heads(q.shape[-2], k.shape[-2], names, hint=_exchanged(q.shape[-3], k.shape[-3], rank))
    if sinks is not None:
        check_sinks(sinks, q)


def check_kinds(
    inputs: dict[str, Tensor], any_dtype: bool = False, device_types: tuple[str, ...] | None = None
) -> None:
    """One 16-bit type and one device for all.

    Args:
        any_dtype: the types are converted later.
        device_types: where the tensors may be; None: where calls run, or on meta, which stands for any.
    """
    name, first = next(iter(inputs.items()))
    if not any_dtype:
        if first.dtype not in DTYPES:
            check_dtypes(inputs, torch.float16, "attention computes in 16 bit")
        check_dtypes(inputs, first.dtype, f"{name} is {first.dtype}")
    check_devices(inputs, device_types or (("meta",) if first.is_meta else DEVICE_TYPES))


def _exchanged(len_q: int, len_k: int, rank: int) -> str:
    """What to add to an error about heads: whether these lengths would fit better as head counts."""
    if not len_k or len_q % len_k:
        return ""
    order, axes = ("(batch, heads, seq, d)", "1, 2") if rank == 4 else ("(heads, total, d)", "0, 1")
    also = ", or call sdpa, which takes that order" if rank == 4 else ""
    return f". The shapes look like {order}: pass q.transpose({axes}) and k and v likewise{also}"


def check_head_sizes(
    d_head: int, d_head_v: int, names: tuple[str, str] = ("q and k", "v"), padded: bool = False
) -> None:
    """Those that some kernel, perhaps a padded one, computes.

    Args:
        names: of the tensors that have them, for messages.
        padded: all up to the largest, since the caller pads them.
    """
    for name, d in zip(names, (d_head, d_head_v), strict=True):
        # A size that a compiled program holds open is asked for by comparisons, which it can keep.
        is_one = 0 < d <= HEAD_SIZES[-1] and d % HEAD_SIZES.step == 0
        if is_one or (padded and 0 < d < HEAD_SIZES[-1]):
            continue
        if not 0 < d < HEAD_SIZES[-1]:
            remedy = "for others call torch.nn.functional.scaled_dot_product_attention"
        else:
            wanted = -(-d // HEAD_SIZES.step) * HEAD_SIZES.step
            # The scale is that of q and k: to pad v does not change it.
            then = (
                f"pass softmax_scale={d}**-0.5"
                if name != names[1]
                else f"take the result's first {d} columns"
            )
            remedy = f"pad {name} with zeros to {wanted}, and {then}"
        raise ValueError(
            f"the head size of {name} is {d}; supported are the multiples of {HEAD_SIZES.step} from "
            f"{HEAD_SIZES.start} to {HEAD_SIZES[-1]}: {remedy}"
        )


def check_heads(
    n_heads: int, n_heads_kv: int, names: tuple[str, str, str] = ("q", "k", "v"), hint: str = ""
) -> None:
    """Every kv head serves the same number of query heads.

    Args:
        names: of the tensors, for the message.
        hint: its end.
    """
    q, k, v = names
    if n_heads_kv == n_heads or (n_heads_kv and n_heads and n_heads % n_heads_kv == 0):
        return
    raise ValueError(
        f"{q} has {n_heads} heads and {k} and {v} have {n_heads_kv}; the heads of {q} must be a multiple of "
        f"those of {k} and {v}: for any other order give them a head for each of {q}{hint}"
    )


def check_sinks(sinks: Tensor, q: Tensor) -> None:
    """One logit a query head, float32 or in q's type, on q's device."""
    n_heads = q.shape[-2]
    if tuple(sinks.shape) != (n_heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it must be ({n_heads},): one a head of q")
    if sinks.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"sinks is {sinks.dtype}; it must be torch.float32 or {q.dtype}: use sinks.float()")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, q on {q.device}: move it with .to(q.device)")


def check_out(out: Tensor, shape: tuple[int, ...], inputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The output given by the caller, which is to have this type."""
    check_tensors({"out": out})
    check_no_gradient({"out": out}, "an output that is given has no gradient", "pass out=None")
    check_output("out", out, shape, dtype, inputs)


def check_choice(
    backend: str | None,
    config: ForwardConfig | None,
    q: Tensor,
    backward_config: BackwardConfig | None = None,
) -> None:
    """An explicit backend and explicit configurations must fit the tensors."""
    check_tensors({"q": q})
    if not (backend is None or (isinstance(backend, str) and backend in DEVICE_TYPES)):
        raise ValueError(f"backend is {given(backend)}; it must be one of {', '.join(DEVICE_TYPES)}, or None")
    if backend is not None and backend != q.device.type:
        raise ValueError(
            f"backend is {backend!r}, but the tensors are on {q.device}: move them with .to({backend!r}), or "
            "pass backend=None"
        )
    for name, named, direction in (
        ("config", config, FORWARD),
        ("backward_config", backward_config, BACKWARD),
    ):
        if named is None:
            continue
        check_config(named, name, direction)
        if named.dtype is not DTYPES.get(q.dtype, named.dtype):
            raise TypeError(f"{name} computes in {named.dtype.name}, q is {q.dtype}: take one of q's type")


def check_seed(seed: object, q: Tensor) -> None:
    """Refuses a seed of dropout that is neither None nor a 64-bit number on the device of q.

    Raises:
        TypeError: no such tensor.
        ValueError: on another device.
    """
    if seed is None:
        return
    if not (isinstance(seed, Tensor) and seed.ndim == 0 and seed.dtype is torch.int64):
        raise TypeError(
            f"dropout_seed is {given(seed)}; it must be a tensor () int64 on the device of q, or None: "
            "PyTorch's generator gives one then"
        )
    if seed.device != q.device:
        raise ValueError(f"dropout_seed is on {seed.device}, and q on {q.device}: move it there")


def check_problem(problem: AttentionProblem) -> None:
    """A problem that a caller made by hand: such that there are tensors of it.

    Raises:
        TypeError, ValueError: as for the tensors.
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(
            f"a problem is {given(problem)}; it must be an AttentionProblem, which has the call's sizes and "
            "features, e.g. AttentionProblem(DType.BF16, 1, 4096, 4096, 16, 16, 128, 128, right=0)"
        )
    if not isinstance(problem.dtype, DType):
        raise TypeError(f"a problem's dtype is {given(problem.dtype)}; it must be DType.FP16 or DType.BF16")
    for name in ("batch", "seq_len_q", "seq_len_k", "n_heads", "n_heads_kv", "d_head", "d_head_v"):
        size = getattr(problem, name)
        if type(size) is not int or size < 0:
            error = ValueError if type(size) is int else TypeError
            raise error(f"a problem's {name} is {given(size)}; it must be an int, at least 0")
    checked_window((problem.left, problem.right))
    checked_sms(problem.n_sms)
    flags = "softcap", "sinks", "varlen", "cached", "paged", "planned", "lse", "out_float32", INVARIANT
    for name in flags:
        checked_flag(f"a problem's {name}", getattr(problem, name))
    if (problem.paged and not problem.cached) or (problem.cached and not problem.varlen):
        raise ValueError(
            f"a problem has paged={problem.paged}, cached={problem.cached}, varlen={problem.varlen}; what is "
            "paged is cached, and what is cached is varlen: turn these on too"
        )
    if problem.planned and not problem.cached:
        raise ValueError(
            f"a problem has planned=True, cached={problem.cached}; what is planned is cached: turn it on too"
        )
    if problem.direction not in (FORWARD, BACKWARD):
        raise ValueError(
            f"a problem's direction is {given(problem.direction)}; it must be {FORWARD!r} or {BACKWARD!r}"
        )
    checked_flag("a problem's deterministic", problem.deterministic)
    for name in ("paged", "planned"):
        if getattr(problem, name) and problem.direction != FORWARD:
            raise ValueError(
                f"a problem is {name}, and its direction is 'backward'; keys in pages, and packed queries "
                "over a cache, have no gradient"
            )
    check_head_sizes(problem.d_head, problem.d_head_v)
    check_heads(problem.n_heads, problem.n_heads_kv)
