"""Checks of the tensors of a backward pass that a caller asks for by name."""

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

AXES = "(batch, seq, heads, d)"


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
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse}
    check_inputs(q, k, v, None, AXES)
    given = {name: x for name, x in {**inputs, **outputs}.items() if x is not None}
    check_tensors(given)
    check_no_gradient(given, "gradients of gradients are not made", "differentiate attention(…) once")
    for name, x in given.items():
        if has_own_dispatch(x):
            raise TypeError(
                f"{name} is a {type(x).__name__}; backward runs at once, on plain tensors: call attention(…) "
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
