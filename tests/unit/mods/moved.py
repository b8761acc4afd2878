"""A function with the tensors that it captures on another device."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


def moved(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A copy of a function whose closures, defaults and globals hold their tensors on ``device``."""
    return _moved(function, device, {})


def _moved(value: Any, device: str, seen: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_moved(x, device, seen) for x in value)
    if isinstance(value, functools.partial):
        inner = _moved(value.func, device, seen)
        keywords = {name: _moved(x, device, seen) for name, x in value.keywords.items()}
        return functools.partial(inner, *_moved(value.args, device, seen), **keywords)
    if not isinstance(value, types.FunctionType) or (value.__module__ or "").startswith("torch"):
        return value
    if id(value) in seen:
        return seen[id(value)]
    names = set(value.__code__.co_names)
    held = {
        name: x
        for name, x in value.__globals__.items()
        if name in names and isinstance(x, torch.Tensor | types.FunctionType)
    }
    cells = None if value.__closure__ is None else tuple(types.CellType() for _ in value.__closure__)
    own = dict(value.__globals__) if held else value.__globals__
    made = types.FunctionType(value.__code__, own, value.__name__, None, cells)
    seen[id(value)] = made
    if held:
        own.update({name: _moved(x, device, seen) for name, x in held.items()})
    made.__defaults__ = _moved(value.__defaults__, device, seen)
    made.__kwdefaults__ = value.__kwdefaults__ and {
        name: _moved(x, device, seen) for name, x in value.__kwdefaults__.items()
    }
    for old, new in zip(value.__closure__ or (), cells or (), strict=True):
        new.cell_contents = _moved(old.cell_contents, device, seen)
    return made
