"""Arguments that flash-attn's functions share, in the words of ``flash_attention.attention``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import SymInt, Tensor

from flash_attention.checks.options import checked_flag, given
from flash_attention.checks.tensors import check_tensors
from flash_attention.compat.padding import missing_columns
from flash_helpers.kernels.problem import MAX_SPLITS, Window

WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


def options_of(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    lse: tuple[str, bool],
) -> dict[str, Any]:
    """The keywords of ``flash_attention.attention``. The scale is that of q as the caller gave it.

    Args:
        lse: name and value of the flag that asks for it.
    """
    if softmax_scale is None and missing_columns(q):
        softmax_scale = q.shape[-1] ** -0.5
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _window(window_size),
        "softcap": softcap,
        "return_lse": checked_flag(*lse),
    }


def _window(window_size: tuple[int, int]) -> Window:
    if isinstance(window_size, Tensor | np.ndarray) and window_size.ndim == 1:
        if isinstance(window_size, Tensor):
            check_tensors({"window_size": window_size})
        sides = window_size.tolist()  # those of a device are waited for
    else:
        sides = window_size
    if isinstance(sides, tuple | list) and len(sides) == 2:
        left, right = (host_number("window_size", side) for side in sides)
        if all(type(side) is int or isinstance(side, SymInt) for side in (left, right)):
            return (None if left < 0 else left), (None if right < 0 else right)
    raise TypeError(
        f"window_size is {given(window_size)}; it must be two whole numbers (left, right), such as (128, 0), "
        "where -1 means no limit"
    )


def host_number(name: str, x: Any) -> Any:
    """The whole number in a tensor of one or of NumPy, as flash-attn takes it; a device's is waited for.

    Anything else stays as it is, for the checks to refuse: nothing is rounded.
    """
    if isinstance(x, Tensor) and x.ndim == 0 and x.dtype in WHOLE:
        check_tensors({name: x})
        return x.item()
    return int(x) if isinstance(x, np.integer) else x


def in_one_piece(**rows: Tensor | None) -> list[Tensor | None]:
    """Offsets and counts by their names, of any stride, as flash-attn 3 takes them. TypeError: no tensor."""
    check_tensors({name: x for name, x in rows.items() if x is not None})
    return [x if x is None else x.contiguous() for x in rows.values()]


def parts_of(num_splits: int) -> int | None:
    """How many parts a caller wants; 0 is for the library to decide."""
    if type(num_splits) is not int:
        raise TypeError(f"num_splits is {given(num_splits)}; it must be an int, 0 for the library to decide")
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(
            f"num_splits is {num_splits}; it must be 0 to {MAX_SPLITS}, 0 for the library to decide"
        )
    return num_splits or None


def checked_packing(name: str, pack_gqa: bool | None) -> None:
    """How the heads of a group are to be laid out, which the library decides: None, or a flag."""
    if pack_gqa is not None:
        checked_flag(name, pack_gqa, ", or None: it changes no result")
