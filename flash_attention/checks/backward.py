"""Checks of the tensors of a backward pass: what a caller hands over by name, and what autograd kept."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attention.checks.calls import check_inputs
from flash_attention.checks.memory import overlap, overlaps_itself
from flash_attention.checks.tensors import (
    check_memory,
    check_no_gradient,
    check_output_kind,
    check_tensors,
    has_own_dispatch,
)
from flash_helpers.messages import named_type

AXES = "(batch, seq, heads, d)"
KINDS = (torch.float16, torch.bfloat16)


def check_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    outputs: dict[str, Tensor | None],
) -> None:
    """All that ``backward`` asks of its tensors. Strides may be any.

    Args:
        dout, q, k, v, o, lse, dlse: inputs of ``backward``.
        outputs: ``dq``, ``dk``, ``dv``, each given by the caller or None.

    Raises:
        TypeError, ValueError, NotImplementedError: as the checks of ``forward`` do.
    """
    required = {"dout": dout, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    check_inputs(q, k, v, None, AXES)
    optional = {name: x for name, x in {"dlse": dlse, **outputs}.items() if x is not None}
    given = {**required, **optional}
    check_tensors(given)
    check_no_gradient(given, "gradients of gradients are not made", "differentiate attention(…) once")
    for name, x in given.items():
        if has_own_dispatch(x):
            raise TypeError(
                f"{name} is {named_type(x)}; backward runs at once, on plain tensors: call attention(…) "
                "and differentiate it, which is an operator to those who trace"
            )
    check_memory(given)
    of_out = (*q.shape[:3], v.shape[3])
    of_lse = (q.shape[0], q.shape[2], q.shape[1])
    for name, x in (("dout", dout), ("o", o)):
        _check_kind(name, x, of_out, q.dtype, q, "like the output of the forward pass")
    for name, rows in (("lse", lse), ("dlse", dlse)):
        if rows is not None:
            _check_kind(name, rows, of_lse, torch.float32, q, "(batch, heads, seq), as attention returns it")
    likes = {"dq": q, "dk": k, "dv": v}
    written = {name: x for name, x in outputs.items() if x is not None}
    for name, x in written.items():
        check_output_kind(name, x, tuple(likes[name].shape), q.dtype, q.device)
        if overlaps_itself(x):
            raise ValueError(
                f"elements of {name} share memory (shape {tuple(x.shape)}, strides {tuple(x.stride())}); "
                f"each needs its own: pass {name}=None to get a new tensor"
            )
        for other, y in given.items():
            if other != name and overlap(x, y):
                raise ValueError(
                    f"{name} overlaps {other} in memory: pass a {name} of its own, or {name}=None"
                )


def check_saved(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor
) -> None:
    """Tensors of the forward pass as autograd hands them to the backward pass.

    The caller's hooks of saved tensors may have stood in between, and autograd does not look at what they
    give back; a kernel would read beside what they gave. Of ``dout`` autograd knows the shape.

    Raises:
        ValueError: one does not fit the others.
    """
    rows, d_head, where = tuple(dout.shape[:-1]), q.shape[-1] if q.ndim else 0, dout.device
    kind = next((x.dtype for x in (q, k, v, dout) if x.dtype in KINDS), KINDS[0])
    # (batch, seq, heads) to (batch, heads, seq), (total, heads) to (heads, total)
    of_lse = (*rows[:-2], rows[-1], rows[-2])
    of_k = tuple(k.shape[:-1])
    if k.ndim != dout.ndim or of_k[: len(rows) - 2] != rows[:-2] or (of_k[-1] and rows[-1] % of_k[-1]):
        of_k = rows
    expected = {
        "q": (q, (*rows, d_head), kind),
        "k": (k, (*of_k, d_head), kind),
        "v": (v, (*of_k, dout.shape[-1]), kind),
        "sinks": (sinks, (rows[-1],), None),
        "out": (out, tuple(dout.shape), None),
        "lse": (lse, of_lse, torch.float32),
    }
    for name, (x, shape, dtype) in expected.items():
        if x is None:
            continue
        if not (tuple(x.shape) == shape and x.device == where and dtype in (None, x.dtype)):
            wanted = f"{shape} {dtype or x.dtype} on {where}"
            raise ValueError(
                f"{name} came back from autograd as {tuple(x.shape)} {x.dtype} on {x.device}, and {wanted} "
                "is what fits the other saved tensors and the output's gradient: hooks of saved tensors "
                "(torch.autograd.graph.saved_tensors_hooks) have to give back what they were given"
            )


def _check_kind(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor, what: str
) -> None:
    """Shape, type and device of an input that follows from q, k and v."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; with these q, k and v it is {shape}, {what}")
    if x.dtype is not dtype:
        raise TypeError(f"{name} is {x.dtype}; it must be {dtype}: convert it with {name}.to({dtype})")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}: move it with .to(q.device)")
