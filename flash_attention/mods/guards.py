"""Whether a function of the user's is as it was: what it does follows from its code and from what it holds.

A function is looked at once, when it has been recorded. Afterwards a guard says of any function whether it
has the same code and holds the same values: in its closure, defaults, ``functools.partial`` and the globals
that its code names, functions among them likewise. Numbers and text are compared by value, tensors by
identity and by what can be asked of one without reading it. A function that holds anything else, such as a
list or an object with attributes, that asks Python or PyTorch for what its code does not name, or that writes
to what is outside of it, has no guard: it is recorded in each call.

A guard says in nested tuples what is compared. The binding compares it (``src/binding/guard.hpp``), since
each call with functions waits for it.
"""

from __future__ import annotations

import dis
import functools
import math
import operator
import types
import weakref
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Guard = tuple[Any, ...]  # src/binding/guard.hpp says which there are

_VALUES = (bool, int, str, bytes, type(None), torch.dtype, torch.device, complex, type(Ellipsis))
_MODULES = (torch, math, operator, functools)  # whose names nobody changes
_WRITES = frozenset(
    (
        "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF", "STORE_ATTR", "DELETE_ATTR",
        "STORE_SUBSCR", "DELETE_SUBSCR", "IMPORT_NAME", "YIELD_VALUE", "LOAD_NAME", "STORE_SLICE",
    )
)  # fmt: skip

# Functions of Python that reach what code does not name.
_UNSEEN = frozenset(
    ("globals", "locals", "vars", "eval", "exec", "getattr", "hasattr", "open", "input", "id", "__import__")
)


class UnguardedError(Exception):
    """A function whose deeds do not follow from what can be compared."""


def guards_of(
    functions: Iterable[Any], compared: Iterable[Tensor], *, asks_where: bool
) -> tuple[Guard | None, ...]:
    """Guards of functions as they are now; None of None.

    Args:
        functions: what was recorded together.
        compared: captured tensors of which somebody else compares ``facts``.
        asks_where: a function has asked a tensor for its address, or whether it requires a gradient.

    Raises:
        UnguardedError: there are none.
    """
    functions, ids = tuple(functions), frozenset(map(id, compared))
    others: list[Tensor] = []
    guards = _guards(functions, _Seen(compared=ids, by_identity=not asks_where, others=others))
    if others and not asks_where:  # views of one memory may be seen as one tensor: each has to stay there
        guards = _guards(functions, _Seen(compared=ids))
    return guards


def _guards(functions: tuple[Any, ...], seen: _Seen) -> tuple[Guard | None, ...]:
    return tuple(None if function is None else _value(function, seen) for function in functions)


class _Seen(NamedTuple):
    """What is known where a value is looked at.

    Attributes:
        functions: ids of those around it.
        compared: ids of the tensors of which somebody else compares ``facts``.
        by_identity: of these no address counts, nor whether they require a gradient.
        others: takes the tensors that are not among them; None: nobody wants to know.
    """

    functions: tuple[int, ...] = ()
    compared: frozenset[int] = frozenset()
    by_identity: bool = False
    others: list[Tensor] | None = None


def _value(value: Any, seen: _Seen) -> Guard:
    if isinstance(value, FunctionType) and (value.__closure__ or not _is_fixed(_module_of(value))):
        return _function(value, seen)
    if type(value) is functools.partial:
        return _partial(value, seen)
    if isinstance(value, Tensor):
        if id(value) not in seen.compared and seen.others is not None:
            seen.others.append(value)
        return _tensor(value, id(value) in seen.compared, seen.by_identity)
    if type(value) is tuple or (isinstance(value, tuple) and _is_fixed(type(value).__module__)):
        return _items(value, seen)
    if type(value) is float:
        return ("bits", value)
    if isinstance(value, _VALUES) and type(value) in _VALUES:
        return ("equals", value)
    if isinstance(value, np.integer | np.floating) and value and value == value:  # no zero, which has a sign
        return ("equals", value)
    if isinstance(value, types.ModuleType):
        if value not in _MODULES and not _is_fixed(value.__name__):
            raise UnguardedError
        return ("is", value)
    if isinstance(value, types.BuiltinFunctionType | FunctionType | type):
        if not _is_fixed(_module_of(value)):
            raise UnguardedError
        return ("is", value)
    raise UnguardedError


def _module_of(value: Any) -> str | None:
    """Where a function was written: ``functools.wraps`` copies ``__module__``, and not the globals."""
    return value.__globals__.get("__name__") if isinstance(value, FunctionType) else value.__module__


def _is_fixed(module: str | None) -> bool:
    """Whether a module's functions do the same whenever they are called."""
    name = (module or "").partition(".")[0]
    return name in ("torch", "math", "operator", "functools", "builtins", "_operator") or (
        module is not None and module.startswith("flash_attention.mods")
    )


def _tensor(value: Tensor, compared: bool, by_identity: bool) -> Guard:
    if value.__dict__:  # what stands there may change, and the function may read it
        raise UnguardedError
    reference = weakref.ref(value)
    if compared and by_identity:
        return ("tensor", reference)
    address, requires_grad, about = value.data_ptr(), value.requires_grad, facts(value)

    def is_same(x: Any) -> bool:
        held = reference()
        return (
            held is not None
            and x is held
            and held.data_ptr() == address
            and held.requires_grad is requires_grad
            and not held.__dict__
            and (compared or facts(held) == about)
        )

    return ("asks", is_same)


def facts(x: Tensor) -> tuple[Any, ...]:
    """What can be asked of a tensor without reading its values, beside its address and ``requires_grad``."""
    return (x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.is_conj())


def _items(value: tuple[Any, ...], seen: _Seen) -> Guard:
    return ("items", type(value), tuple(_value(x, seen) for x in value))


def _keywords(value: dict[str, Any], seen: _Seen) -> Guard:
    """Of names and values, in their order."""
    return _items(tuple(value), seen), _items(tuple(value.values()), seen)


def _partial(value: functools.partial[Any], seen: _Seen) -> Guard:
    function, args = _value(value.func, seen), _items(value.args, seen)
    return ("partial", functools.partial, function, args, _keywords(value.keywords, seen))


def _function(value: FunctionType, seen: _Seen) -> Guard:
    if id(value) in seen.functions:  # it holds itself
        raise UnguardedError
    seen = seen._replace(functions=(*seen.functions, id(value)))
    code, namespace = value.__code__, value.__globals__
    if value.__dict__ or not _only_reads(code):
        raise UnguardedError
    cells = tuple(_value(_content(cell), seen) for cell in value.__closure__ or ())
    names = _global_names(code)
    found = tuple((name, _value(namespace[name], seen)) for name in names if name in namespace)
    built_in = tuple(name for name in names if name not in namespace)
    if not _UNSEEN.isdisjoint(built_in):
        raise UnguardedError
    defaults = None if value.__defaults__ is None else _items(value.__defaults__, seen)
    keywords = None if value.__kwdefaults__ is None else _keywords(value.__kwdefaults__, seen)
    return ("function", code, namespace if names else None, found, built_in, cells, defaults, keywords)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise UnguardedError from None


@functools.lru_cache(1024)
def _only_reads(code: CodeType) -> bool:
    """Whether code writes to nothing but its own variables, and brings in nothing."""
    own = set(code.co_cellvars)
    for instruction in dis.get_instructions(code):
        writes_own = instruction.opname == "STORE_DEREF" and instruction.argval in own
        if instruction.opname in _WRITES and not writes_own:
            return False
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and _asks_for_state(instruction.argval):
            return False
    return all(_only_reads(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _asks_for_state(name: str) -> bool:
    """Whether a function of PyTorch of this name tells of a switch, such as ``torch.is_grad_enabled``, or is
    refused by one."""
    if name in ("no_grad", "inference_mode", "enable_grad"):
        return True
    return name.endswith("_enabled") or name.startswith(("get_", "are_", "current_"))


@functools.lru_cache(1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that code reads, and the functions within it."""
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += _global_names(inner)
    return tuple(dict.fromkeys(names))
