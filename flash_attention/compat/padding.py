"""Head sizes that no kernel takes, padded with zeros to the next one that some kernel does."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from flash_attention.checks.calls import check_inputs
from flash_attention.run.tracing import wants_autocast
from flash_helpers.kernels.problem import HEAD_SIZES

Result = Tensor | tuple[Tensor, ...]


def missing_columns(x: Any) -> int:
    """Columns up to the next head size that kernels take."""
    if not isinstance(x, Tensor) or x.is_nested or not x.ndim:
        return 0
    return -x.shape[-1] % HEAD_SIZES.step


def check_unpadded(q: Tensor, k: Tensor, v: Tensor, layout: str, layout_kv: str | None = None) -> None:
    """Refuses the caller's tensors as they are: once padded, different head sizes may be equal.

    Where nothing is padded, the call itself checks them, but for arrays of other libraries, which it takes.

    Args:
        layout: the axes of q, and of k and v.
        layout_kv: those of k and v, if they are others: a cache, or pages.
    """
    tensors = all(isinstance(x, Tensor) for x in (q, k, v))
    if not tensors or any(map(missing_columns, (q, k, v))):
        any_dtype = tensors and wants_autocast(q, k, v)
        check_inputs(
            q, k, v, None, layout, layout_kv is not None, True, any_dtype, layout_kv=layout_kv
        )  # fmt: skip


def padded(x: Tensor) -> Tensor:
    """x with the columns that it lacks. The caller has checked it as it was."""
    missing = missing_columns(x)
    return pad(x, (0, missing)) if missing else x


def cut(result: Result, v: Tensor) -> Result:
    """A result whose output has no more columns than v has."""
    if not missing_columns(v):
        return result
    if isinstance(result, tuple):
        return result[0][..., : v.shape[-1]], *result[1:]
    return result[..., : v.shape[-1]]
