"""``merge``: attention over all keys from attention over parts of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_attention import dlpack
from flash_helpers.messages import named_type


def merge(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The attention of queries over several parts of their keys, from the result for each part.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log(sum_i exp(lse_i))``, in float32 and in the order
    in which the parts are given, so that equal calls give equal bits. A part whose LSE is -inf takes no part,
    whatever its output holds; a query without any has output 0 and LSE -inf. A part whose LSE is +inf takes
    all the weight; several share it. PyTorch differentiates the result.

    Args:
        outputs: what ``attention`` returned for each part, (batch, seq, heads, d), or packed
            (total, heads, d); at least one, of equal shapes, types and devices.
        lses: the LSEs of the same parts, (batch, heads, seq) or (heads, total), float32 or float64.
        out_dtype: type of the merged output; None: that of ``outputs``.

    Arrays of other libraries that have ``__dlpack__`` are taken in place of tensors, as ``attention`` takes
    them; the results are then of the library of the first output.

    Returns:
        The merged output and its LSE in float32.

    Raises:
        TypeError: no tensors, or an ``out_dtype`` that is no floating type.
        ValueError: no part, another number of LSEs, or shapes, types or devices that differ.
    """
    if any(map(dlpack.is_foreign, (*_listed("outputs", outputs), *_listed("lses", lses)))):
        own = ([dlpack.imported(x) for x in given] for given in (outputs, lses))
        merged: tuple[Tensor, Tensor] = dlpack.exported(merge(*own, out_dtype=out_dtype), outputs[0])
        return merged
    outputs, lses = _checked(outputs, lses)
    out_dtype = merged_type(out_dtype, outputs[0])
    parts = [lse.float() for lse in lses]
    largest = torch.stack([lse.detach() for lse in parts]).amax(0)
    base = largest.masked_fill(largest.isinf(), 0.0)
    weights = [_weight(lse, largest, base) for lse in parts]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    nothing = total == 0
    divisor = total.masked_fill(nothing, 1.0)
    out = torch.zeros_like(outputs[0], dtype=torch.float32)
    for output, weight in zip(outputs, weights, strict=True):
        share = _over_columns(weight / divisor)
        out = out + output.float().masked_fill(share == 0, 0.0) * share
    lse = (base + divisor.log()).masked_fill(nothing, -math.inf).masked_fill(largest == math.inf, math.inf)
    return out.to(out_dtype), lse


def merged_type(out_dtype: torch.dtype | None, outputs: Tensor) -> torch.dtype:
    """The type of a merged output; None: that of its parts. TypeError: no floating type."""
    if out_dtype is None:
        return outputs.dtype
    if not isinstance(out_dtype, torch.dtype) or not out_dtype.is_floating_point:
        raise TypeError(f"out_dtype is {out_dtype!r}; it must be a floating type or None")
    return out_dtype


def _weight(lse: Tensor, largest: Tensor, base: Tensor) -> Tensor:
    """The weight of a part beside the others: 1 for the largest LSE, 0 for one of -inf."""
    infinite = largest == math.inf
    weight = (lse.masked_fill(infinite, 0.0) - base).exp().masked_fill(infinite, 0.0)
    return weight.masked_fill(lse == math.inf, 1.0)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """``merge`` of a running result and one more part, in place and without gradients.

    Takes a third of the memory and less than a third of the passes of ``merge``, and differs from it by
    float32 rounding alone. A part whose LSE is -inf must have output 0, as that of ``attention`` has.

    Args:
        out: (batch, seq, heads, d) float32; where its LSE is -inf it must be 0.
        lse: (batch, heads, seq) float32.
        part: like out.
        part_lse: like lse.
    """
    difference = part_lse - lse
    weight = difference.sigmoid().masked_fill_(part_lse == -math.inf, 0.0)
    weight.masked_fill_((part_lse == math.inf) & (lse == math.inf), 0.5)  # both take all: they share it
    out.lerp_(part, _over_columns(weight))
    lse.copy_(torch.logaddexp(lse, part_lse))


def merge_sinks_into(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """``merge_into`` with a part that is (heads,) one logit a head without a value."""
    logit = sinks.float()[None, :, None]
    weight = (lse - logit).sigmoid().masked_fill_(lse == -math.inf, 0.0)
    weight.masked_fill_((lse == math.inf) & (logit == math.inf), 0.5)
    out.mul_(_over_columns(weight))
    lse.copy_(torch.logaddexp(lse, logit.expand_as(lse)))


def _over_columns(weight: Tensor) -> Tensor:
    """(batch, heads, seq) as (batch, seq, heads, 1); (heads, total) as (total, heads, 1)."""
    return weight.transpose(-1, -2)[..., None]


def _listed(name: str, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts, if they are a list."""
    if isinstance(given, Tensor) or not isinstance(given, Sequence):
        raise TypeError(f"{name} is {named_type(given)}; it must be a list of tensors")
    return given


def _checked(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    for name, given in (("outputs", outputs), ("lses", lses)):
        for i, x in enumerate(given):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}[{i}] is {named_type(x)}; it must be a tensor")
            if x.layout is not torch.strided or x.is_nested:
                kind = "nested" if x.is_nested else str(x.layout)
                raise TypeError(f"{name}[{i}] is a {kind} tensor; it must be dense (torch.strided)")
    if not outputs or len(outputs) != len(lses):
        raise ValueError(
            f"outputs has {len(outputs)} parts and lses {len(lses)}; give at least one part and its LSE"
        )
    first = outputs[0]
    if first.ndim not in (3, 4) or not first.is_floating_point():
        raise ValueError(
            f"outputs[0] has shape {tuple(first.shape)} and type {first.dtype}; it must be "
            "(batch, seq, heads, d) or (total, heads, d), of a floating type"
        )
    wanted = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if (output.shape, output.dtype, output.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"outputs[{i}] is {tuple(output.shape)}, {output.dtype} on {output.device}, and outputs[0] "
                f"{tuple(first.shape)}, {first.dtype} on {first.device}; parts must be equal in these"
            )
        if tuple(lse.shape) != wanted or lse.device != first.device:
            raise ValueError(
                f"lses[{i}] is {tuple(lse.shape)} on {lse.device}; for outputs of {tuple(first.shape)} on "
                f"{first.device} it must be {wanted} there"
            )
        if lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lses[{i}] is {lse.dtype}; it must be float32 or float64")
    return list(outputs), list(lses)
