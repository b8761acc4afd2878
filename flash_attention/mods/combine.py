"""Masks made of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flash_helpers.messages import named_type

MaskMod = Callable[..., Any]


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask under which a query sees the keys that it sees under each of the masks.

    Args:
        mask_mods: functions ``mask_mod(b, h, q_idx, kv_idx)``, at least one.

    Raises:
        TypeError: one of them cannot be called.
        ValueError: there is none.
    """
    _check("and_masks", mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = mask_mods[0](b, h, q_idx, kv_idx)
        for mask_mod in mask_mods[1:]:
            visible = visible & mask_mod(b, h, q_idx, kv_idx)
        return visible

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """A mask under which a query sees the keys that it sees under at least one of the masks.

    Args:
        mask_mods: functions ``mask_mod(b, h, q_idx, kv_idx)``, at least one.

    Raises:
        as ``and_masks``.
    """
    _check("or_masks", mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = mask_mods[0](b, h, q_idx, kv_idx)
        for mask_mod in mask_mods[1:]:
            visible = visible | mask_mod(b, h, q_idx, kv_idx)
        return visible

    return or_mask


def _check(name: str, mask_mods: tuple[object, ...]) -> None:
    if not mask_mods:
        raise ValueError(f"{name} was given no mask; pass at least one mask_mod(b, h, q_idx, kv_idx)")
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise TypeError(
                f"{name} was given {named_type(mask_mod)}; pass functions "
                "mask_mod(b, h, q_idx, kv_idx): dense_mask(mask) makes one of a tensor of bools, "
                "mask_of_blocks(block_mask) of a BlockMask"
            )
