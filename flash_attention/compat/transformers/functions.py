"""Mask functions of Transformers that are no band, as mask functions of ``attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import masking_utils

from flash_attention.errors import ModError
from flash_attention.mods import and_masks, dense_mask, trace


def mask_mod_of(given: dict[str, Any], places: tuple[int, int], tokens: Tensor | None) -> Callable[..., Any]:
    """What a mask function lets a query see of the tokens, as a ``mask_mod`` that counts from 0.

    The function itself, if it can be recorded: no tensor of all pairs is made. Else the grid of the pairs
    that Transformers draws.

    Args:
        given: the arguments that Transformers passed to the mask interface.
        places: of the first query and of the first key.
        tokens: (batch, keys) bool, False for padding; None: there is none.
    """
    mask_function, (q_place, k_place) = given["mask_function"], places

    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h * 0, q_idx + q_place, kv_idx + k_place)  # eager masks know one head

    seen = shifted
    try:
        trace(mask_mod=shifted, device=given.get("device", "cpu"))
    except ModError:
        seen = dense_mask(grid_of(given))
    return seen if tokens is None else and_masks(seen, of_tokens(tokens))


def grid_of(given: dict[str, Any], attention_mask: Tensor | None = None) -> Tensor:
    """The pairs that the mask function allows, (batch|1, 1, seq_len_q, seq_len_k) bool.

    Args:
        given: as of ``mask_mod_of``.
        attention_mask: (batch, tokens), False for padding, which no query sees; None: all are tokens.
    """
    grid: Any = masking_utils.sdpa_mask(
        **{
            **given,
            "attention_mask": None if attention_mask is None else attention_mask.bool(),
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
    )
    assert isinstance(grid, Tensor)  # nothing was skipped
    return grid


def of_tokens(tokens: Tensor) -> Callable[..., Any]:
    """The ``mask_mod`` of keys that are tokens, (batch, keys) bool."""
    return dense_mask(tokens[:, None, None, :])
