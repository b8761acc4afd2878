"""Of which inputs a backward pass wants gradients: it may leave out some of those that require one."""

from __future__ import annotations

from typing import Any

import torch

from flash_attention.torch_private import is_asked_for, is_transforming


def asked_for(ctx: Any) -> Any:
    """Of which arguments of a function a gradient is wanted now: of some of those that require one.

    Returns:
        What stands in ``ctx.needs_input_grad``: a flag for each argument, or a list of flags for a list.
    """
    needs = ctx.needs_input_grad
    if torch.compiler.is_compiling() or is_transforming():
        return needs
    # Edges are of tensors alone; those that require no gradient lead nowhere.
    asked = [is_asked_for(node) for node, _ in ctx.next_functions if node is not None]
    if all(asked):
        return needs
    left = iter(asked)
    return tuple(
        [flag and next(left) for flag in needed]
        if isinstance(needed, list | tuple)
        else needed and next(left)
        for needed in needs
    )
