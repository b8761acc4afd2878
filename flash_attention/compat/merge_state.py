"""``merge_state`` of FlashInfer and its like by their names, shapes and meaning.

LSEs are logarithms to the base 2 there: those of this library, natural ones, are these times ln 2.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.tensors import (
    check_no_gradient,
    check_tensors,
)
from flash_attention.compat.written import check_written
from flash_attention.merge import merge

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]

LN2 = log(2.0)
ROWS = "(seq_len, n_heads, d_head)"
ALONE = "pass {name}.contiguous(), and keep it"
APART = "pass {name}.clone(), and keep it, or call merge_state"


def check_parts(
    name: str,
    v: Tensor,
    name_of_lse: str,
    s: Tensor,
    axes: str,
    parts: int | None = None,
    lse_types: tuple[torch.dtype, ...] | None = None,
) -> None:
    """An output and its LSEs, one for each row of it.

    Args:
        name, name_of_lse: what the caller calls them.
        axes: of the output.
        parts: which axis counts parts, of which there must be one; None: it is one part.
        lse_types: of the LSEs; None: all floating ones.
    """
    check_tensors({name: v, name_of_lse: s})
    if v.ndim != axes.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(v.shape)}; it must be {axes}")
    for of, x in ((name, v), (name_of_lse, s)):
        if not x.is_floating_point():
            raise TypeError(f"{of} is {x.dtype}; it must be of a floating type")
    if lse_types is not None and s.dtype not in lse_types:
        allowed = " or ".join(map(str, lse_types))
        raise TypeError(f"{name_of_lse} is {s.dtype}; it must be {allowed}: use {name_of_lse}.float()")
    if parts is not None and not v.shape[parts]:
        raise ValueError(f"{name} has shape {tuple(v.shape)}; it must have one part at least")
    if s.shape != v.shape[:-1] or s.device != v.device:
        raise ValueError(
            f"{name_of_lse} has shape {tuple(s.shape)} on {s.device}; beside {name} {tuple(v.shape)} on "
            f"{v.device} it must be {tuple(v.shape[:-1])} there: a logarithm each row and head"
        )


def _check_alike(name: str, v: Tensor, other: str, v_other: Tensor) -> None:
    if (v.shape, v.dtype, v.device) != (v_other.shape, v_other.dtype, v_other.device):
        raise ValueError(
            f"{name} is {tuple(v.shape)}, {v.dtype} on {v.device}, and {other} {tuple(v_other.shape)}, "
            f"{v_other.dtype} on {v_other.device}; both must be equal in these"
        )


@named_keywords
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two parts of the keys, from that over each.

    Args:
        v_a: (seq_len, n_heads, d_head), the output for the first part.
        s_a: (seq_len, n_heads), its LSE to the base 2, float32.
        v_b: like v_a, for the second part.
        s_b: like s_a.

    Returns:
        The output like v_a, and its LSE to the base 2, (seq_len, n_heads) float32.

    Raises:
        as ``flash_attention.merge``.
    """
    check_parts("v_a", v_a, "s_a", s_a, ROWS)
    check_parts("v_b", v_b, "s_b", s_b, ROWS)
    _check_alike("v_a", v_a, "v_b", v_b)
    return _merged([v_a, v_b], [s_a, s_b])


@named_keywords
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """``merge_state`` of any number of parts.

    Args:
        v: (seq_len, n_parts, n_heads, d_head).
        s: (seq_len, n_parts, n_heads), float32.

    Returns, Raises:
        as ``merge_state``.
    """
    check_parts("v", v, "s", s, "(seq_len, n_parts, n_heads, d_head)", parts=1)
    return _merged(list(v.unbind(1)), list(s.unbind(1)))


@named_keywords
def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """``merge_state``, written over the first part.

    Args:
        v: (seq_len, n_heads, d_head), written.
        s: (seq_len, n_heads), written.
        v_other: like v.
        s_other: like s.
        mask: (seq_len,) bool, rows to merge; None: all.

    Raises:
        NotImplementedError: a gradient is wanted.
        ValueError: what is written overlaps another tensor; what ``merge_state`` raises.
    """
    check_parts("v", v, "s", s, ROWS)
    check_parts("v_other", v_other, "s_other", s_other, ROWS)
    _check_alike("v", v, "v_other", v_other)
    given = {"v": v, "s": s, "v_other": v_other, "s_other": s_other}
    check_no_gradient(given, "what is written in place has no gradient", "call merge_state")
    if mask is not None:
        check_tensors({"mask": mask})
        if mask.dtype is not torch.bool or tuple(mask.shape) != (len(v),) or mask.device != v.device:
            raise ValueError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}; it must be torch.bool "
                f"of shape ({len(v)},) on {v.device}: whether each row of v is merged"
            )
    for name in ("v", "s"):
        others = {other: x for other, x in given.items() if other != name}
        check_written(name, given[name], others, ALONE, APART)
    out, lse = _merged([v, v_other], [s, s_other])
    if mask is not None:
        out, lse = out.where(mask[:, None, None], v), lse.where(mask[:, None], s)
    v.copy_(out)
    s.copy_(lse)


def _merged(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = merge(outputs, [lse.float().mul(LN2).transpose(-1, -2) for lse in lses])
    return out, lse.transpose(-1, -2).contiguous() / LN2
