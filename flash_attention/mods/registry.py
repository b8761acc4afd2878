"""The functions of PyTorch that can be recorded, by name; ``rules`` fills the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_attention.errors import ModError
from flash_attention.mods.refusal import refused
from flash_attention.torch_private import OPERATOR, OVERLOAD

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
# Methods that take their arguments in another order than the function of their name, and the rule of each.
METHODS = {"where": "_where_as_a_method"}
NOTHING_WRITTEN = "A mod writes nothing: it returns a new value"
_NO_RULE = "has no rule by which it could be recorded"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Puts a function into the table under some names."""

    def added(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return added


def call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``__torch_function__`` was told of: the rule for a function of PyTorch."""
    name = name_of(function)
    if name is None or name not in RULES:
        raise unknown(shown(function))
    if kwargs.get("inplace"):
        raise refused(f"{name} has inplace=True", f"{NOTHING_WRITTEN}. Leave it out, and take the result")
    return call_named(name, args, kwargs)


def call_named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A rule, by the name of the function."""
    try:
        return RULES[name](*args, **kwargs)
    except ModError:
        raise
    except TypeError as error:
        said = str(error).replace("()", "").partition(" ")[2]
        raise refused(
            f"{name} is called in a way that is not recorded ({said})",
            "Call it with values and numbers alone",
        ) from None


def name_of(function: Any) -> str | None:
    """The name of a function of PyTorch; of others None, whatever they are called."""
    name: Any
    if isinstance(function, (OPERATOR, OVERLOAD)):
        library, _, rest = str(function).partition(".")  # "aten.add", of an overload "aten.add.Tensor"
        if library != "aten":
            return None
        name = rest.partition(".")[0]
    else:
        module = getattr(function, "__module__", None) or getattr(function, "__objclass__", torch).__module__
        if module.partition(".")[0] != "torch":
            return None
        name = getattr(function, "__name__", None)
        if name in METHODS and function is getattr(torch.Tensor, name):
            name = METHODS[name]
    return name if not isinstance(name, str) or name.startswith("__") else name.rstrip("_")


def shown(function: Any) -> str:
    """A function in a message."""
    if isinstance(function, (OPERATOR, OVERLOAD)):
        return f"the operator {function}"
    return f"the function {getattr(function, '__name__', function)}"


def unknown(what: str) -> ModError:
    """The error for a function without a rule."""
    return refused(f"{what} {_NO_RULE}", _known())


def is_in_place(function: Any) -> bool:
    """Whether a function of PyTorch writes to its first argument, as ``torch.relu_`` and ``Tensor.add_``."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    return name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))


def in_place(name: str) -> ModError:
    """The error for a function that writes."""
    if name == "__setitem__":
        return refused("the function writes to a captured tensor", NOTHING_WRITTEN)
    plain = name.rstrip("_")
    remedy = f". Write value = {plain}(value, …)" if plain in RULES else ""
    return refused(f"{name} writes to a value or to a captured tensor", f"{NOTHING_WRITTEN}{remedy}")


def without_rule(what: str) -> str:
    """The same as a text, without a line."""
    return f"{what} {_NO_RULE}. {_known()}"


def _known() -> str:
    return f"Functions that have one: {', '.join(sorted(name for name in RULES if name[0] != '_'))}"
