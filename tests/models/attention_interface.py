"""This library as the attention of ``transformers`` models: ``attn_implementation=NAME``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen

transformers = pytest.importorskip("transformers")  # who imports this is skipped then, with the reason
NAME = "this_library"  # transformers takes a name with "flash" in it for one of its own packages


def register() -> None:
    """Makes the implementation known to ``transformers``."""
    transformers.AttentionInterface.register(NAME, model_attention)
    transformers.AttentionMaskInterface.register(NAME, padding_of)


def padding_of(*sizes: Any, attention_mask: Tensor | None = None, **unused: Any) -> Tensor | None:
    """The mask that ``model_attention`` gets: (batch, keys), True where a token is; None: nowhere padded."""
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask.bool()


def model_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function of a model.

    Args:
        query: (batch, heads, queries, d_head), as all here: not contiguous.
        key, value: (batch, kv heads, keys, d_head).
        attention_mask: what ``padding_of`` gives. Padded batches are packed.

    Returns:
        (batch, queries, heads, d_head), with zeros where a token is padding.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if attention_mask is None:
        return attention(q, k, v, causal=causal, softmax_scale=scaling), None
    lengths = attention_mask.sum(1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    packed = [x[attention_mask] for x in (q, k, v)]
    rows = attention_varlen(*packed, ends, ends, longest, longest, causal=causal, softmax_scale=scaling)
    out = q.new_zeros(q.shape)
    out[attention_mask] = rows
    return out, None
